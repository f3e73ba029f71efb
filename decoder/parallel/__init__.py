"""Tensor parallelism: which rank holds what, collectives, rank processes."""
