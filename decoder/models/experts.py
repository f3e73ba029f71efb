"""Mixture of experts (MoE): the router, and the experts that a row activates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.protocol import ExpertWeights, MixtureKernels
from paceline.decoder.models.family import parts
from paceline.decoder.models.layers import Mlp, Part, Weights, biased, frozen, joined_vectors, scaled
from paceline.decoder.weights.quantize import joined


class MixtureOfExperts(nn.Module):
    """A row sums its active experts: exact, and independent of other rows. No row is dropped."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str]) -> None:
        super().__init__()
        plan = part.plan.experts
        assert plan is not None
        assert part.plan.gated, "experts are gated"
        self._plan, self._kernels, self._group = plan, part.kernels, part.group
        self.router = frozen(weights.pop(f"{inner['router']}.weight"))
        self.router_shift = frozen(weights.pop(f"{inner['router']}.bias")) if plan.router_bias else None
        self.router_bias = frozen(weights.pop(inner["router bias"])) if plan.corrected else None
        named = [{key: name.format(e=e) for key, name in inner.items()} for e in range(plan.count)]
        kernels = part.kernels.mixture
        self.experts: EveryExpert | ChosenExperts = (
            EveryExpert(part, weights, named)
            if kernels is None
            else ChosenExperts(part, weights, named, kernels=kernels)
        )
        self.shared = Mlp(part, weights, parts(inner, "shared")) if plan.shared else None
        weighted = plan.shared and plan.shared_weighted
        self.shared_router = frozen(weights.pop(f"{inner['shared router']}.weight")) if weighted else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        return self.mixed(x, self.shares(x, real), real)

    def shares(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Weights of the experts [b, T, E] by what the router reads, 0 for inactive ones."""
        logits = biased(self._kernels.linear(x, self.router, real), self.router_shift)
        if self._plan.scores == "sparse mixer":
            return two_best(logits, self._plan.slack)
        return self.chosen(torch.softmax(logits, -1) if self._plan.scores == "softmax" else sigmoid(logits))

    def mixed(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """The sum of the experts by their shares, and of the shared one."""
        if self._plan.weighs_inputs:
            mixed = self.experts(x * shares.sum(-1, keepdim=True), (shares > 0).to(x.dtype), real)
        else:
            mixed = self.experts(x, shares, real)
        if self.shared is not None:
            added = self.shared.share(x, real)
            if self.shared_router is not None:
                added = sigmoid(self._kernels.linear(x, self.shared_router, real)) * added
            mixed = mixed + added
        mixed = self._group.reduce(mixed)
        if self.experts.down_bias is not None:
            mixed = mixed + self._kernels.linear(shares, self.experts.down_bias, real)
        return mixed if self.shared is None else biased(mixed, self.shared.down_bias)

    def chosen(self, scores: Tensor) -> Tensor:
        """Map the router's scores [b, T, E] to the weight of each expert, 0 for inactive ones."""
        plan = self._plan
        ranked = scores if self.router_bias is None else scores + self.router_bias.flatten()
        if plan.groups > 1:
            grouped = ranked.unflatten(-1, (plan.groups, -1))
            best = torch.where(_rank(grouped) < plan.of_group, grouped, 0.0).sum(-1)
            open_groups = (_rank(best) < plan.chosen_groups).unsqueeze(-1)
            ranked = torch.where(open_groups, grouped, _NEVER).flatten(-2)
        chosen_scores = torch.where(_rank(ranked) < plan.chosen, scores, 0.0)
        if plan.normalise:
            chosen_scores = chosen_scores / chosen_scores.sum(-1, keepdim=True)
        return scaled(chosen_scores, plan.scale)


def _beside(biases: Sequence[Tensor]) -> nn.Parameter:
    """Biases of experts [H] each as a matrix [H, E], whose product with shares [b, T, E] is their part of the sum."""
    return frozen(torch.stack([bias.float() for bias in biases], 1))


_NEVER = -1e30
"""A score below every other, and finite."""


def _rank(scores: Tensor) -> Tensor:
    """Return how many entries of the last dimension are before each: larger ones, and equal ones of lower index."""
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    own, other = scores.unsqueeze(-1), scores.unsqueeze(-2)
    before = (other > own) | ((other == own) & (numbers < numbers.unsqueeze(-1)))
    return before.to(torch.float32).sum(-1)


def two_best(scores: Tensor, slack: float) -> Tensor:
    """Map scores [b, T, E] to shares: of each of the two best, its softmax among those within ``slack`` of it.

    The second one's softmax is without the best. A distance is relative to the larger of both sizes.
    """
    ranks = _rank(scores)
    shares = torch.zeros_like(scores)
    for rank in (0, 1):
        own = ranks == rank
        best = torch.where(own, scores, 0.0).sum(-1, keepdim=True)
        near = (ranks >= rank) & ((best - scores) / torch.maximum(scores.abs(), best) <= 2 * slack)
        shares = torch.where(own, torch.softmax(torch.where(near, scores, _NEVER), -1), shares)
    return shares


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), made of operators that are known to lower to HLO."""
    return 0.5 * torch.tanh(0.5 * x) + 0.5


class ChosenExperts(nn.Module):
    """The matrices of all experts concatenated by rows, for kernels that read active experts only."""

    def __init__(
        self, part: Part, weights: Weights, named: Sequence[dict[str, str]], *, kernels: MixtureKernels
    ) -> None:
        super().__init__()
        self._kernels, self._activation = kernels, part.plan.activation
        sides = [side for side in ("gate up", "gate", "up") if side in named[0]]
        self.gate_up = joined([part.matrix(weights, inner[side]) for inner in named for side in sides])
        self.down = joined([part.matrix(weights, inner["down"]) for inner in named])
        self.bias = self.down_bias = None
        if part.plan.mlp_bias:
            names = [f"{inner[side]}.bias" for inner in named for side in sides]
            self.bias = frozen(joined_vectors(weights, names).float())
            self.down_bias = _beside([frozen(weights.pop(f"{inner['down']}.bias")) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """x [b, T, H], shares [b, T, E] -> [b, T, H]: what this rank adds to the sum, without ``down_bias``."""
        weights = ExpertWeights(self.gate_up, self.down, self._activation, self.bias)
        return self._kernels.experts(x, shares, weights, count=real)


class EveryExpert(nn.ModuleList):
    """Compute every row with every expert, for graphs of fixed shape that cannot select experts."""

    def __init__(self, part: Part, weights: Weights, named: Sequence[dict[str, str]]) -> None:
        super().__init__([Mlp(part, weights, inner) for inner in named])
        biases = [expert.down_bias for expert in self if isinstance(expert, Mlp) and expert.down_bias is not None]
        self.down_bias = _beside(biases) if biases else None

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        total = torch.zeros_like(x)
        for index, expert in enumerate(self):
            total = total + shares[..., index : index + 1] * expert.share(x, real)  # type: ignore[operator]
        return total
