"""Reading and writing weights: checkpoints, file formats, atomic writes."""
