"""What every block of one rank of an assembled model is made with, and how it takes a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.models.blueprint import AssembledConfig, Names
from paceline.decoder.models.layers import Weights
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.quantize import Stored


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a model, the kernels it computes with, and what its tensors are called."""

    shard: Shard
    kernels: Kernels
    group: Collectives
    names: Names

    @property
    def config(self) -> AssembledConfig:
        config = self.shard.config
        assert isinstance(config, AssembledConfig), "the family's own `config` made it"
        return config

    def taken(self, weights: Weights, name: str) -> Stored:
        """A product's matrix as [out, in], which a quantised one is already. Takes it out of ``weights``."""
        weight = weights.pop(f"{name}.weight")
        return weight.t().contiguous() if self.names.transposed and isinstance(weight, Tensor) else weight
