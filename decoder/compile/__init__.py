"""Compilation of a step to an artefact: lowering, rewrites, lints, the compile cache."""
