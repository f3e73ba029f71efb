"""What all trainings share: the frozen target, data, features, the trainer and its saved state."""
