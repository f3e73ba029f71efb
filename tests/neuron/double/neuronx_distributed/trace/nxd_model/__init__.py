"""A stand-in for what runs compiled graphs."""
