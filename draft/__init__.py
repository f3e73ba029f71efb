"""Drafters without trained parts of their own: a smaller model, n-grams of the text, a plain function."""
