"""What turns a step (a module of fixed shapes) into something that runs: one file per backend."""
