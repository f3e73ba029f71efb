"""Acceptance rules: which drafted tokens are kept, and the bonus or recovered token after them. One file per rule."""
