"""Code shared by Medusa and EAGLE heads: checkpoint folders, the frozen target, data, hidden states, the trainer."""
