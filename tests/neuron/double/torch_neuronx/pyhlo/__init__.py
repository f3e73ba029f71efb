"""A stand-in for the SDK's classes of HLO."""
