"""Decoders: model families as fixed-shape graphs over row-addressed caches, and the backends that run them."""
