"""Backends, graphs, checks and arithmetic for AWS Neuron and XLA; nothing else of the package imports it eagerly."""
