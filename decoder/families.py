"""Which class decodes which ``model_type``: a literal table of lazy paths. A new family is a file and a row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.decoder.kernels import Kernels
from paceline.decoder.model_config import ModelConfig

if TYPE_CHECKING:
    from paceline.decoder.llama import LlamaModel

FAMILIES = {"llama": ("paceline.decoder.llama", "LlamaModel")}


def build(config: ModelConfig, weights: dict[str, Tensor], kernels: Kernels, *, positions: int) -> LlamaModel:
    """The model of a configuration, on the given kernels."""
    module, name = FAMILIES[config.model_type]
    made: LlamaModel = getattr(importlib.import_module(module), name)(config, weights, kernels, positions=positions)
    return made
