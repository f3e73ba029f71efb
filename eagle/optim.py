"""The optimizers of a head: Muon for the matrices of its layer, AdamW for the rest.

Muon: momentum whose updates are made nearly orthogonal (Jordan et al., 2024), sized like AdamW's at the same rate
(Liu et al., arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For matrices alone. ``dtype``: what updates are made orthogonal in; bfloat16 does, where a CPU has it."""

    def __init__(
        self,
        params: Iterable[Tensor],
        rate: float,
        *,
        momentum: float = 0.95,
        decay: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dtype = dtype
        super().__init__(params, {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(state["momentum"], group["momentum"]).to(self._dtype))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])


def orthogonal(x: Tensor) -> Tensor:
    """A matrix with nearly the singular vectors of x and singular values near 1."""
    a, b, c = _QUINTIC
    tall = x.shape[0] > x.shape[1]
    y = x.T if tall else x
    y = y / (y.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    found: Tensor = y.T if tall else y
    return found
