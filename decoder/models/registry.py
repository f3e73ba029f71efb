"""Which class decodes which ``model_type``: a literal table of lazy paths. A new family is a file and a row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard

if TYPE_CHECKING:
    from paceline.decoder.models.llama import LlamaModel

FAMILIES = {"llama": ("paceline.decoder.models.llama", "LlamaModel")}


def build(
    shard: Shard, weights: dict[str, Tensor], kernels: Kernels, *, positions: int, group: Collectives
) -> LlamaModel:
    """A rank's part of the model of a configuration, on the given kernels."""
    module, name = FAMILIES[shard.config.model_type]
    make = getattr(importlib.import_module(module), name)
    made: LlamaModel = make(shard, weights, kernels, positions=positions, group=group)
    return made
