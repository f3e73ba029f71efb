"""Backends: each turns a step (a module of fixed shapes) into a callable; one file per backend."""
