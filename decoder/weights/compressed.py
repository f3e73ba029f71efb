"""The layout of quantised weights in a safetensors checkpoint: ``int-quantized`` and ``float-quantized`` of
compressed-tensors.

A matrix X.weight is int8 or float8_e4m3fn [N, K], and X.weight_scale has a scale for every row, [N, 1], or one for all
of them, [1]; config.json says so in ``quantization_config``. Weights alone are quantised. Not here: the files, and how
numbers are rounded.
"""

import copy
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.weights.quantize import WeightFormat

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

STORED_FORMATS = {"I8": WeightFormat.INT8, "F8_E4M3": WeightFormat.FP8_E4M3}
"""By what safetensors call a type: the format of a matrix with scales."""

_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("int", "float"),
    "symmetric": (True,),
    "strategy": ("channel", "tensor"),
}


def quantization_config(form: WeightFormat) -> dict[str, Any] | None:
    """What config.json says of matrices in a format; None: the layout has no place for it."""
    if form not in (WeightFormat.INT8, WeightFormat.INT8_PER_TENSOR, WeightFormat.FP8_E4M3):
        return None
    made = copy.deepcopy(QUANTIZATION_CONFIG)
    weights = made["config_groups"]["group_0"]["weights"]
    if form is WeightFormat.FP8_E4M3:
        made["format"], weights["type"] = "float-quantized", "float"
    if form is WeightFormat.INT8_PER_TENSOR:
        weights["strategy"] = "tensor"
    return made


def check_quantization_config(values: object, where: str) -> None:
    """Refuse what says that weights are quantised otherwise.

    Raises:
        UnknownArchitectureError: another method or format, or activations are quantised, too.
    """
    wrong = _why_not(values)
    if wrong:
        raise UnknownArchitectureError(
            f"{where}: quantization_config says that the weights are quantised, and of that only int8 and float8_e4m3 "
            "weights with a scale for every row or matrix are supported (compressed-tensors, int-quantized and "
            f"float-quantized), not {wrong}; use the checkpoint in float32, bfloat16 or float16, and quantization=... "
            "when loading it."
        )


def _why_not(values: object) -> str:
    if not isinstance(values, Mapping):
        return f"a {type(values).__name__}"
    for name, allowed in (
        ("quant_method", ("compressed-tensors",)),
        ("format", ("int-quantized", "float-quantized", "naive-quantized")),
        ("kv_cache_scheme", (None,)),
    ):
        if values.get(name) not in allowed:
            return f"{name} = {values.get(name)!r}"
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "config_groups that are missing"
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return "a group without weights"
        for name, value in _WEIGHTS.items():
            if weights.get(name) not in value:
                return f"weights with {name} = {weights.get(name)!r}"
        for name in ("input_activations", "output_activations"):
            if group.get(name) is not None:
                return name
    return ""
