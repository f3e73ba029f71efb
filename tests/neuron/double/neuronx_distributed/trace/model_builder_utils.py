"""The records that pass between tracing, compiling and loading."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class ModelParamInfo:
    param_name: str
    is_positional: bool


@dataclass
class ProvidedArgInfo:
    param_name: str
    is_positional: bool
    tensor: torch.Tensor


@dataclass
class MetaNeff:
    """Names, shapes and types of weights and states."""

    weights: dict[str, tuple[list[int], torch.dtype]]
    states: dict[str, tuple[list[int], torch.dtype]]


@dataclass
class Flattener:
    layout: tuple[int, ...] | list[int]


@dataclass
class TraceArtifacts:
    hlo: Any
    metaneff: MetaNeff
    flattener: Flattener
    weight_name_to_idx: dict[str, int]
    provided_args: list[ProvidedArgInfo]
    model_params: list[ModelParamInfo]


class CompilationArtifacts:
    def __init__(self, neff_filepath: str) -> None:
        self.neff_filepath = neff_filepath

    def get_neff_bytes(self) -> bytes:
        return Path(self.neff_filepath).read_bytes()
