"""Contents of a worker process: a target with its engine, or a draft model."""
