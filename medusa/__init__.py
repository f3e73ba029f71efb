"""Medusa: heads on the target that propose trees of tokens."""
