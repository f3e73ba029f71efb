"""The records that pass between tracing, compiling and loading."""

from __future__ import annotations

import json
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
    weight_names_to_skip: set[str]
    provided_args: list[ProvidedArgInfo]
    model_params: list[ModelParamInfo]


class CompilationArtifacts:
    def __init__(self, neff_filepath: str) -> None:
        self.neff_filepath = neff_filepath

    def get_neff_bytes(self) -> bytes:
        return Path(self.neff_filepath).read_bytes()


class WLOArtifacts(CompilationArtifacts):
    def __init__(self, neff_filepath: str, wrapped_neff_hlo_filepath: str | None = None) -> None:
        super().__init__(neff_filepath)
        self.wrapped_neff_hlo_filepath = wrapped_neff_hlo_filepath


class LayoutTransformation:
    """`torch.classes.neuron.LayoutTransformation`: takes the weights it was made for, all of them and no others."""

    def __init__(self, neff: bytes, metaneff: bytes, local_ranks_size: int) -> None:
        self.moved, self.names, self.ranks = set(json.loads(neff)), set(json.loads(metaneff)), local_ranks_size

    def forward(self, sharded_checkpoint, serialize):
        assert len(sharded_checkpoint) == self.ranks and not serialize
        made = []
        for rank in sharded_checkpoint:
            if set(rank) != self.names:
                raise RuntimeError(f"other weights than the priority model's: {sorted(set(rank) ^ self.names)}")
            laid = {name: x.T.contiguous() if name in self.moved else x.clone() for name, x in rank.items()}
            for name in self.moved:
                laid[name].laid = True
            made.append(laid)
        return made


class LayoutTransformerArtifacts:
    def __init__(self, hlo_filepath: str, neff_filepath: str, metaneff_filepath: str) -> None:
        self.hlo_filepath, self.neff_filepath, self.metaneff_filepath = hlo_filepath, neff_filepath, metaneff_filepath

    def construct_layout_transformer_object(self, local_ranks_size):
        neff, metaneff = (Path(file).read_bytes() for file in (self.neff_filepath, self.metaneff_filepath))
        return LayoutTransformation(neff, metaneff, local_ranks_size)
