"""A fake for the compiler's package: only its version is read."""
