"""Parameters of a network in training, by the names of a head's tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.weights.quantize import MatrixLike


class TrainingKernels(TorchKernels):
    """Kernels whose matmuls support autocast and gradients."""

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        assert isinstance(weight, Tensor), "training has no quantised matrices"
        return F.linear(x, weight)


def register(module: nn.Module, name: str, value: Tensor) -> None:
    """Register a parameter under a dotted name; make the modules that the name goes through."""
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    module.register_parameter(last, nn.Parameter(value))


def initial(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return initial values: those of `nn.Linear`; norms ones, biases zeros, what stands for unknown states random."""
    if name == "mask_hidden":
        return torch.randn(shape)
    value = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5)) if len(shape) > 1 else value
