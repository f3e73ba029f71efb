"""Which model gets which cores: instances, model files, footprints and the planner. Pure; starts nothing."""
