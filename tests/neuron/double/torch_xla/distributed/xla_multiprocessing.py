"""Double of torch_xla's processes, which accelerate imports; nothing starts one."""
