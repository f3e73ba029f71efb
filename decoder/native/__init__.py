"""CPU kernels: matmul with a weight matrix, attention over cache rows, sampling of a token."""
