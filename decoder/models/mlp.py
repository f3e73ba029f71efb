"""What a layer of an assembled model does with each row by itself: an MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.protocol import ExpertWeights, MixtureKernels
from paceline.decoder.models.layers import Weights, biased, frozen, joined_vectors
from paceline.decoder.models.part import Part
from paceline.decoder.weights.quantize import joined, matrix


class Mlp(nn.Module):
    """down(activation(up(x))), or gated: down(activation(gate(x)) * up(x))."""

    def __init__(self, part: Part, weights: Weights, inner: dict[str, str]) -> None:
        super().__init__()
        plan = part.config.blueprint
        self._kernels, self._group, self._gated = part.kernels, part.group, plan.gated
        self._activation = plan.activation
        sides = [side for side in ("gate up", "gate", "up") if side in inner]
        self.up = joined([part.taken(weights, inner[side]) for side in sides])
        self.up_bias = joined_vectors(weights, [f"{inner[side]}.bias" for side in sides]) if plan.mlp_bias else None
        self.down = matrix(part.taken(weights, inner["down"]))
        self.down_bias = frozen(weights.pop(f"{inner['down']}.bias")) if plan.mlp_bias else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        return biased(self._group.reduce(self.share(x, real)), self.down_bias)

    def share(self, x: Tensor, real: Tensor | None) -> Tensor:
        """What this rank adds to the sum, without the bias."""
        inner = biased(self._kernels.linear(x, self.up, real), self.up_bias)
        inner = self._kernels.activate(inner, self._activation, gated=self._gated)
        return self._kernels.linear(inner, self.down, real)


class MixtureOfExperts(nn.Module):
    """A row adds up the experts that it chose: exact, and independent of the other rows. No row is ever dropped."""

    def __init__(self, part: Part, weights: Weights, inner: dict[str, str]) -> None:
        super().__init__()
        plan = part.config.blueprint
        assert plan.experts is not None
        assert plan.gated and not plan.mlp_bias, "experts are gated and have no biases"
        self._plan, self._kernels, self._group = plan.experts, part.kernels, part.group
        self.router = frozen(weights.pop(f"{inner['router']}.weight"))
        named = [{key: name.format(e=e) for key, name in inner.items()} for e in range(plan.experts.count)]
        kernels = part.kernels.mixture
        self.experts: EveryExpert | ChosenExperts = (
            EveryExpert(part, weights, named)
            if kernels is None
            else ChosenExperts(part, weights, named, kernels=kernels)
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        shares = self.chosen(torch.softmax(self._kernels.linear(x, self.router, real), -1))
        return self._group.reduce(self.experts(x, shares, real))

    def chosen(self, probs: Tensor) -> Tensor:
        """Router probabilities [b, T, E] -> of each expert what it counts for, 0 of those that are not chosen."""
        numbers = torch.arange(probs.shape[-1], device=probs.device)
        own, other = probs.unsqueeze(-1), probs.unsqueeze(-2)
        ahead = (other > own) | ((other == own) & (numbers < numbers.unsqueeze(-1)))
        chosen_probs = torch.where(ahead.to(torch.float32).sum(-1) < self._plan.chosen, probs, 0.0)
        return chosen_probs / chosen_probs.sum(-1, keepdim=True) if self._plan.normalise else chosen_probs


class ChosenExperts(nn.Module):
    """The matrices of all experts below each other, for kernels that read those of chosen ones alone."""

    def __init__(
        self, part: Part, weights: Weights, named: Sequence[dict[str, str]], *, kernels: MixtureKernels
    ) -> None:
        super().__init__()
        self._kernels, self._activation = kernels, part.config.blueprint.activation
        sides = [side for side in ("gate up", "gate", "up") if side in named[0]]
        self.gate_up = joined([part.taken(weights, inner[side]) for inner in named for side in sides])
        self.down = joined([part.taken(weights, inner["down"]) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """x [b, T, H], shares [b, T, E] -> [b, T, H]: what this rank adds to the sum."""
        weights = ExpertWeights(self.gate_up, self.down, self._activation)
        return self._kernels.experts(x, shares, weights, count=real)


class EveryExpert(nn.ModuleList):
    """Every expert computes every row, for graphs of fixed shape that cannot follow what a row chose.

    That reads all experts' weights, for a single token as for a window.
    """

    def __init__(self, part: Part, weights: Weights, named: Sequence[dict[str, str]]) -> None:
        super().__init__([Mlp(part, weights, inner) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """As `ChosenExperts`."""
        total = torch.zeros_like(x)
        for index, expert in enumerate(self):
            total = total + shares[..., index : index + 1] * expert.share(x, real)  # type: ignore[operator]
        return total
