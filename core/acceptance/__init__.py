"""Acceptance rules: which drafted tokens are kept, and the target's own token after them. One file per rule."""
