"""The AWS Neuron backend, written against the documented SDK; it has not run on hardware."""
