"""Messages that signatures name; a module is a `torch_neuronx.xla_impl.trace.Module` here."""

from __future__ import annotations


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return object
