"""A stand-in for the tracing part of neuronx_distributed."""
