"""Compiled decoders: model families as fixed-shape graphs over row-addressed caches, and what compiles them."""
