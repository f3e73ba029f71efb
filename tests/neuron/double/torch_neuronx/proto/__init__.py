"""A stand-in for the SDK's protobufs."""
