"""How the EAGLE head of the demo pair was trained: the commands are in its README."""
