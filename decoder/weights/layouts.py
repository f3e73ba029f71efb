"""Quantised matrices as programs store them: how config.json describes them, and the names of their tensors.

A row for each layout; `paceline.decoder.weights.coded` has its reader, by the same name. Files in which some matrices
are floats load, whatever config.json says of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.formats import WeightFormat

STORED_FORMATS = {"I8": WeightFormat.INT8, "F8_E4M3": WeightFormat.FP8_E4M3, "F8_E5M2": None}
"""By what safetensors call a type: the format of a matrix with scales; None: it is read as floats."""

OWN_METHOD = "paceline"
"""The ``quant_method`` of what other programs do not read."""

_NOTHING: tuple[object, ...] = (None, False, {}, [])
_COMPRESSED = "compressed-tensors"

Allowed = Mapping[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """A way to store the matrix X.weight of a module X.

    name     of the row, and of the reader
    method   ``quant_method`` in config.json
    summary  one line for tables
    parts    names of a matrix's tensors after "X."; a module with the first one has a quantised matrix, if ``scales``
             names none, or if it has one of these too
    scales   see ``parts``
    unused   tensors of such a module that do not change its weights
    allowed  keys of ``quantization_config`` and the values that are read
    weights  the same of every group of compressed-tensors
    """

    name: str
    method: str
    summary: str
    parts: tuple[str, ...]
    scales: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    allowed: Allowed = field(default_factory=dict)
    weights: Allowed = field(default_factory=dict)


_SCALES = ("weight_scale", "scale")  # of compressed-tensors, and of NxD Inference
_CONFIG: Allowed = {"kv_cache_scheme": _NOTHING, "transform_config": _NOTHING}
_SYMMETRIC: tuple[object, ...] = (True,)

EIGHT_BITS = StoredLayout(
    "8 bits",
    _COMPRESSED,
    "8-bit integers or floats with a scale for each row or matrix (`int-quantized`, `float-quantized`)",
    parts=("weight", *_SCALES),
    scales=_SCALES,
    allowed={**_CONFIG, "format": ("int-quantized", "float-quantized", "naive-quantized")},
    weights={
        "num_bits": (8,),
        "type": ("int", "float"),
        "symmetric": _SYMMETRIC,
        "strategy": ("channel", "tensor"),
    },
)
"""Also the layout of files that config.json says nothing about, as NxD Inference writes them."""

LAYOUTS = (
    EIGHT_BITS,
    StoredLayout(
        "packed integers",
        _COMPRESSED,
        "4 or 8 bits in groups or rows, with zero points or without, columns in any order (`pack-quantized`)",
        parts=("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
        allowed={**_CONFIG, "format": ("pack-quantized",)},
        weights={
            "num_bits": (4, 8),
            "type": ("int",),
            "symmetric": (True, False),
            "strategy": ("channel", "group"),
            "actorder": (None, False, "static", "weight", "group", "dynamic"),
        },
    ),
    StoredLayout(
        "mxfp4",
        _COMPRESSED,
        "MXFP4: 4-bit floats in groups of 32 with a power of two (`mxfp4-pack-quantized`)",
        parts=("weight_packed", "weight_scale"),
        allowed={**_CONFIG, "format": ("mxfp4-pack-quantized",)},
        weights={
            "num_bits": (4,),
            "type": ("float",),
            "symmetric": _SYMMETRIC,
            "strategy": ("group",),
            "group_size": (32,),
        },
    ),
    StoredLayout(
        "mxfp4 experts",
        "mxfp4",
        "MXFP4 of gpt-oss: all experts of a layer in one tensor (`_blocks`, `_scales`)",
        parts=("weight_packed", "weight_scale"),
    ),
    StoredLayout(
        "fp8",
        "fp8",
        "e4m3 with a scale for each block of any size, row or matrix; scales of activations are not used",
        parts=("weight", "weight_scale_inv", "weight_scale"),
        scales=("weight_scale_inv", "weight_scale"),
        unused=("activation_scale", "input_scale"),
        allowed={
            "fmt": (None, "e4m3"),
            "activation_scheme": (None, "dynamic", "static"),
            "scale_fmt": (None, "float", "ue8m0"),
            "expert_dtype": (None, "fp8"),
        },
    ),
    StoredLayout(
        "gptq",
        "gptq",
        "GPTQ: 4 or 8 bits, with or without `desc_act`, zero points of `gptq` and `gptq_v2`, `dynamic` rules",
        parts=("qweight", "qzeros", "scales", "g_idx"),
        allowed={
            "bits": (4, 8),
            "checkpoint_format": (None, "gptq", "gptq_v2"),
            "format": (None, "gptq", "gptq_v2"),
            "pack_dtype": (None, "int32"),
            "is_marlin_format": _NOTHING,
        },
    ),
    StoredLayout(
        "awq",
        "awq",
        "AWQ: 4 bits in the order of `gemm`",
        parts=("qweight", "qzeros", "scales"),
        allowed={
            "bits": (4,),
            "version": (None, "gemm", "GEMM"),
            "format": (None, "gemm", "GEMM"),
            "backend": (None, "auto", "autoawq"),
        },
    ),
    StoredLayout(
        "bitsandbytes",
        "bitsandbytes",
        "4 bits, `nf4` or `fp4`, with double quantisation or without",
        parts=(
            "weight.absmax",
            "weight",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            "weight.quant_state.bitsandbytes__nf4",
            "weight.quant_state.bitsandbytes__fp4",
        ),
        allowed={
            "load_in_8bit": _NOTHING,
            "load_in_4bit": (True,),
            "bnb_4bit_quant_type": (None, "nf4", "fp4"),
            "bnb_4bit_quant_storage": (None, "uint8"),
        },
    ),
    StoredLayout(
        "torchao",
        "torchao",
        "torchao, safetensors: integers or e4m3 in a byte each, in groups or rows",
        parts=("_weight_qdata", "_weight_scale", "_weight_zero_point"),
    ),
)


def layout_of(values: object, where: str) -> StoredLayout:
    """Return the layout that ``quantization_config`` describes; raise UnknownArchitectureError if it is another one."""
    wrong = "" if isinstance(values, Mapping) else f"a {type(values).__name__}"
    if isinstance(values, Mapping):
        method = _COMPRESSED if values.get("quant_method") == OWN_METHOD else values.get("quant_method")
        reasons = {row.name: _why_not(values, row) for row in LAYOUTS if row.method == method}
        for row in LAYOUTS:
            if reasons.get(row.name) == "":
                return row
        named = [row.name for row in LAYOUTS if values.get("format") in row.allowed.get("format", ())]
        said = [reasons[name] for name in (*named, *reasons) if name in reasons]  # first of the row of that format
        wrong = said[0] if said else f"quant_method = {values.get('quant_method')!r}"
    methods = ", ".join(dict.fromkeys(row.method for row in LAYOUTS))
    raise UnknownArchitectureError(
        f"{where}: quantization_config: expected weights as one of {methods} stores them and docs/quantization.md "
        f"lists, got {wrong}; use the checkpoint in float32, bfloat16 or float16, and set quantization when loading it"
    )


def stored_layout(place: Path) -> tuple[StoredLayout, Mapping[str, object]]:
    """Return the layout of a checkpoint, and its ``quantization_config``, which is empty where there is none."""
    file = place / "config.json"
    values = {} if is_gguf(place) or not file.is_file() else read_json_object(file).get("quantization_config")
    if not isinstance(values, Mapping) or not values:
        return EIGHT_BITS, {}
    return layout_of(values, str(file)), values


def _why_not(values: Mapping[str, object], row: StoredLayout) -> str:
    for name, allowed in row.allowed.items():
        if values.get(name) not in allowed:
            return f"{name} = {values.get(name)!r}"
    if row.name == "fp8" and values.get("weight_block_size") is not None and block_of(values) is None:
        return f"weight_block_size = {values['weight_block_size']!r}"
    if not row.weights:
        return ""
    sparsity = values.get("sparsity_config")
    if sparsity not in _NOTHING and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        return f"sparsity_config = {sparsity!r}"
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "config_groups that are missing"
    reasons = (_why_not_group(group, str(values.get("format")), row.weights) for group in groups.values())
    return next((reason for reason in reasons if reason), "")


def _why_not_group(group: object, form: str, wanted: Allowed) -> str:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        return "a group without weights"
    if group.get("format") not in (None, form):
        return f"a group with format = {group.get('format')!r}"
    for name, allowed in wanted.items():
        if weights.get(name) not in allowed:
            return f"weights with {name} = {weights.get(name)!r}"
    for name in ("input_activations", "output_activations"):
        said = group.get(name)
        if said is not None and not (isinstance(said, Mapping) and said.get("dynamic") is True):
            return name
    return ""


def block_of(settings: Mapping[str, object]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of ``quant_method`` fp8; None: each matrix or row has one scale."""
    sizes = settings.get("weight_block_size")
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return sizes[0], sizes[1]
