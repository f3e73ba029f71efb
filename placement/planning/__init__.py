"""Assignment of cores to models: instances, model files, footprints and the planner. Pure; starts no process."""
