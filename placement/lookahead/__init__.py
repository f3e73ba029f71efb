"""Drafting for the likeliest outcomes while the target verifies."""
