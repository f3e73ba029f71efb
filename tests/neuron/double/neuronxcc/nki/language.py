"""The kernels' language, of which neuronx_distributed 0.17 imports the module only."""
