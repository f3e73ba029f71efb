"""What a worker process runs: a target with its engine, or a draft model."""
