"""A stand-in for libneuronxla, which the SDK's compiler is reached through."""
