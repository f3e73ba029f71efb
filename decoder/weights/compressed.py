"""Quantised weights in a safetensors checkpoint: their description in config.json, and the formats of
compressed-tensors that Paceline reads and writes (``int-quantized``, ``float-quantized`` and ``pack-quantized``).

A matrix X.weight is int8 or float8_e4m3fn [N, K], and X.weight_scale has a scale for every row, [N, 1], or one for all
of them, [1]; config.json says so in ``quantization_config``. What compressed-tensors has no place for is written in the
same layout under another ``quant_method``, so that no other program takes it for what it is not: float8_e5m2, and
matrices that a family stores as [K, N], with scales [1, N]. Weights alone are quantised. Not here: the files, how
numbers are rounded, and packed matrices (`paceline.decoder.weights.packed`).
"""

import copy
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.weights.formats import GROUP, WeightFormat

SCALE = "_scale"
"""Behind the name of a matrix: its scales."""

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "group_size": None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
    "kv_cache_scheme": None,
}
"""What config.json says of a checkpoint that is written here with ``quantization="int8"``."""

OWN_METHOD = "paceline"
"""The ``quant_method`` of what other programs do not read."""

STORED_FORMATS = {"I8": WeightFormat.INT8, "F8_E4M3": WeightFormat.FP8_E4M3, "F8_E5M2": WeightFormat.FP8_E5M2}
"""By what safetensors call a type: the format of a matrix with scales."""

_EIGHT_BITS: dict[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int", "float"),
    "symmetric": (True,),
    "strategy": ("channel", "tensor"),
}
_PACKED: dict[str, tuple[object, ...]] = {
    "num_bits": (4, 8),
    "type": ("int",),
    "symmetric": (True, False),
    "strategy": ("channel", "group"),
    "actorder": (None, False, "static", "weight"),
}
_WEIGHTS = {
    "int-quantized": _EIGHT_BITS,
    "float-quantized": _EIGHT_BITS,
    "naive-quantized": _EIGHT_BITS,
    "pack-quantized": _PACKED,
}
"""The formats that are read, and what they may say of weights."""

_NOTHING: tuple[object, ...] = (None, {}, [])


def quantization_config(form: WeightFormat, *, turned: bool = False) -> dict[str, Any] | None:
    """Return the description of matrices of a format for config.json; None: the layout cannot describe it.

    turned  whether the family stores its matrices as [in, out]
    """
    if form is WeightFormat.Q4_1 or (turned and form.block_bytes):
        return None
    made = copy.deepcopy(QUANTIZATION_CONFIG)
    weights = made["config_groups"]["group_0"]["weights"]
    if form.block_bytes:
        bits = 4 if form is WeightFormat.Q4_0 else 8
        made["format"] = "pack-quantized"
        weights.update(num_bits=bits, strategy="group", group_size=GROUP)
    if form.dtype.is_floating_point:
        made["format"], weights["type"] = "float-quantized", "float"
    if form is WeightFormat.INT8_PER_TENSOR:
        weights["strategy"] = "tensor"
    if turned or form is WeightFormat.FP8_E5M2:
        made["quant_method"] = OWN_METHOD
    return made


def check_quantization_config(values: object, where: str) -> None:
    """Refuse what says that weights are quantised otherwise.

    Raises:
        UnknownArchitectureError: another method or format, or activations are quantised, too.
    """
    wrong = _why_not(values)
    if wrong:
        raise UnknownArchitectureError(
            f"{where}: quantization_config: expected 8-bit weights with a scale for each row or matrix, or 4 or 8 "
            f"bits in groups (compressed-tensors, {', '.join(_WEIGHTS)}), got {wrong}; use the checkpoint in "
            "float32, bfloat16 or float16, and set quantization when loading it"
        )


def _why_not(values: object) -> str:
    if not isinstance(values, Mapping):
        return f"a {type(values).__name__}"
    form = values.get("format")
    for name, allowed in (
        ("quant_method", ("compressed-tensors", OWN_METHOD)),
        ("format", tuple(_WEIGHTS)),
        ("kv_cache_scheme", _NOTHING),
        ("transform_config", _NOTHING),
    ):
        if values.get(name) not in allowed:
            return f"{name} = {values.get(name)!r}"
    sparsity = values.get("sparsity_config")
    if sparsity not in _NOTHING and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        return f"sparsity_config = {sparsity!r}"
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "config_groups that are missing"
    reasons = (_why_not_group(group, str(form)) for group in groups.values())
    return next((reason for reason in reasons if reason), "")


def _why_not_group(group: object, form: str) -> str:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        return "a group without weights"
    if group.get("format") not in (None, form):
        return f"a group with format = {group.get('format')!r}"
    for name, allowed in _WEIGHTS[form].items():
        if weights.get(name) not in allowed:
            return f"weights with {name} = {weights.get(name)!r}"
    for name in ("input_activations", "output_activations"):
        if group.get(name) is not None:
            return name
    return ""
