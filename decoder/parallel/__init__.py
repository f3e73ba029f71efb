"""Tensor parallelism: shards of each rank, collectives, rank processes."""
