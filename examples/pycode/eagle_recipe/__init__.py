"""How the EAGLE heads of the demo pair were trained: the commands are in its README."""
