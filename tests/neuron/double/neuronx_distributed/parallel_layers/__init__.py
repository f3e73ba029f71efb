"""A stand-in for the parallel part of neuronx_distributed."""
