"""Double of torch_xla.distributed, which accelerate imports where torch_xla is installed."""
