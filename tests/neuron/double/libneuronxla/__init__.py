"""A fake for libneuronxla, which the SDK's compiler is reached through."""

from __future__ import annotations


def neuron_xla_compile(*, module_bytes, compiler_flags, input_format, platform_target, work_dir, **caching):
    """Compile as the fake SDK does: record the flags. The NEFF is the module's bytes."""
    import torch_neuronx

    assert input_format == "hlo" and not caching["use_cache"] and work_dir.is_absolute()
    if f"--target={platform_target}" not in compiler_flags:
        raise RuntimeError(f"no --target for {platform_target}")
    torch_neuronx.RUNTIME.compile(compiler_flags)
    return module_bytes
