"""Decoders as models of `transformers`: `generate`, `pipeline`, beam search, and assisted generation on Paceline's
engine.
"""
