"""Inputs and outputs of a graph, as far as the real `neuronx_distributed` reads and writes them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch


@dataclass
class MetaTensor:
    class Type(enum.IntEnum):
        USER_INPUT = 0
        INPUT_WEIGHT = 1
        INPUT_STATE = 2
        OUTPUT = 3

    name: str
    type: Type
    shape: list[int]
    data_type: torch.dtype
    checkpoint_key: bytes = b""
    user_input_key: bytes = b""


@dataclass
class MetaNeff:
    input_tensors: list[MetaTensor] = field(default_factory=list)
    output_tensors: list[MetaTensor] = field(default_factory=list)
    output_aliases_to: dict[int, int] = field(default_factory=dict)

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name
        return repr(self).encode()
