"""The target's side of a round: one step from a commit to the next, or position by position on the host."""
