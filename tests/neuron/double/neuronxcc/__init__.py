"""A stand-in for the compiler's package: only its version is read."""
