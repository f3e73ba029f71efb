"""Which chip is compiled for."""

from __future__ import annotations

from torch_neuronx.utils.utils import get_platform_target

__all__ = ["get_platform_target"]
