"""A stand-in for what steps of the SDK import."""
