"""A stand-in for neuronx_distributed."""
