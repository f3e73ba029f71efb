"""Drafters without trained heads: a smaller model, n-grams of the sequence, a plain function."""
