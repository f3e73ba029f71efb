"""EAGLE: one decoder layer that drafts from the target's own hidden states (versions 1, 2 and 3)."""
