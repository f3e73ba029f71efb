"""Decoders as models of `transformers`: `generate`, `pipeline`, beam search, and assisted generation on our engine."""
