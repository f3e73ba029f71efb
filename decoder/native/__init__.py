"""CPU kernels: a product with a weight matrix, attention over cache rows, the choice of a token."""
