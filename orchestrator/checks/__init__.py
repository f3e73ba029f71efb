"""Checks of this machine and of a backend: `paceline doctor` and `paceline selftest`."""
