"""Table of backends and their capabilities: literal rows of lazy paths. A backend is one file and one row."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.formats import WeightFormat


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A backend and its capabilities.

    name     value of ``AutoDecoder.from_pretrained(backend=...)``
    path     "module:Class", which takes no arguments
    summary  one line for tables
    divided  "module:Class" for a sharded model, constructed with the number of ranks; "" = one rank only
    compiles whether graphs take long to compile, so that they are compiled before their first use
    saves    whether compiled graphs can be saved and loaded
    narrow_cache   whether keys and values may have 8 bits (kv_cache_dtype)
    blocks   whether matmuls with quantised blocks (Q8_0, Q4_0, Q4_1) are supported; 8-bit numbers with one scale per
             row are supported by every backend
    slow     whether a graph takes minutes to compile: by default there are few
    e4m3     whether fp8_e4m3 reaches 448, as in PyTorch: on Neuron chips before Trainium3 it has infinity and NaN above
             240 (neuronx_distributed, `quantization_config.py`: `F8E4M3_MAX`)
    """

    name: str
    path: str
    summary: str
    divided: str = ""
    compiles: bool = True
    saves: bool = False
    blocks: bool = True
    narrow_cache: bool = False
    e4m3: bool = True
    slow: bool = False


BACKENDS: dict[str, BackendRow] = {
    row.name: row
    for row in (
        BackendRow(
            "eager",
            "paceline.decoder.backends.eager:EagerBackend",
            "plain PyTorch operations, for tests and comparison",
            divided="paceline.decoder.backends.eager:RankedBackend",
            compiles=False,
            narrow_cache=True,
        ),
        BackendRow(
            "native",
            "paceline.decoder.backends.native:NativeBackend",
            "native kernels on the CPU, nothing is compiled",
            compiles=False,
            narrow_cache=True,
        ),
        BackendRow("xla", "paceline.neuron.xla:XlaBackend", "graphs of torch_xla, to try them out", blocks=False),
        BackendRow(
            "neuron",
            "paceline.neuron.backend:NeuronBackend",
            "AWS Neuron through PyTorch/XLA: Inferentia2, Trainium1, Trainium2",
            divided="paceline.neuron.backend:NeuronBackend",
            saves=True,
            blocks=False,
            e4m3=False,
            slow=True,
        ),
        BackendRow(
            "neuron-native",
            "paceline.neuron.native:NeuronNativeBackend",
            "AWS Neuron through TorchNeuron: Trainium2, Trainium3",
            divided="paceline.neuron.native:NeuronNativeRanks",
            blocks=False,
            e4m3=False,
            slow=True,
        ),
    )
}


def why_not_quantized(row: BackendRow, quantization: str | None) -> str:
    """Return why a backend cannot run matrices in a format; "" if it can. The planner uses the same rule."""
    if row.blocks or quantization is None:
        return ""
    if quantization != "gguf" and not WeightFormat.of(quantization).block_bytes:
        return ""
    able = ", ".join(one.name for one in BACKENDS.values() if one.blocks)
    return (
        f"backend={row.name!r} multiplies with no blocks of quantised weights, as quantization={quantization!r} asks; "
        f"use 'int8', or one of the backends {able}"
    )


def why_not_cached(row: BackendRow, kv_cache_dtype: str | None) -> str:
    """Return why a backend cannot keep keys and values in a format; "" if it can. The planner uses the same rule."""
    if row.narrow_cache or kv_cache_dtype is None:
        return ""
    able = ", ".join(one.name for one in BACKENDS.values() if one.narrow_cache)
    return (
        f"backend={row.name!r} keeps keys and values as amp says, and kv_cache_dtype={kv_cache_dtype!r} asks for 8 "
        f"bits; leave it out, or use one of the backends {able}"
    )


def check(
    name: str, degree: int = 1, quantization: str | None = None, *, kv_cache_dtype: str | None = None
) -> BackendRow:
    """Return the row of a backend; raise ConfigurationError if it lacks these ranks or formats, or there is none."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ConfigurationError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}; use one of them")
    row = BACKENDS[name]
    if degree > 1 and not row.divided:
        able = ", ".join(row.name for row in BACKENDS.values() if row.divided)
        raise ConfigurationError(
            f"tp_degree: expected 1 for backend={name!r}, got {degree}; for tensor parallelism use one of {able}"
        )
    if reason := why_not_quantized(row, quantization) or why_not_cached(row, kv_cache_dtype):
        raise ConfigurationError(reason)
    return row
