"""Measurements: plain against speculative decoding in one run."""
