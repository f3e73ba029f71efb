"""Medusa heads: from one state of the target to the logits of several tokens ahead.

A head is a number of residual blocks, x + silu(W x + b), then a projection to the vocabulary: its own, or the target's
output layer. Holds weights only: tokens are selected by `paceline.medusa.drafter`, training is in
`paceline.medusa.train`, files are in `paceline.medusa.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.core.errors import WeightShapeError
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import whole
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.files import check_finite
from paceline.decoder.weights.quantize import MatrixLike
from paceline.medusa.config import MedusaConfig

Linear = Callable[[Tensor, MatrixLike], Tensor]
"""x [..., in], weight [out, in] -> [..., out]"""


class ResidualBlock(nn.Module):
    """One residual block."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _unknown((width, width), dtype)
        self.bias = _unknown((width,), dtype)

    def forward(self, x: Tensor, linear: Linear) -> Tensor:
        return x + nn.functional.silu(linear(x, self.weight) + self.bias)


class Projection(nn.Module):
    """A head's own vocabulary projection."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _unknown((config.vocab_size, config.hidden_size), dtype)


class Head(nn.Module):
    """Blocks, and a projection unless the heads are tied."""

    def __init__(self, config: MedusaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(config.hidden_size, dtype) for _ in range(config.layers))
        self.projection = None if config.tied else Projection(config, dtype)

    def forward(self, x: Tensor, linear: Linear) -> Tensor:
        for block in self.blocks:
            x = block(x, linear)
        return x


class Heads(nn.Module):
    """All heads. Weights are NaN until `fill` has set every one of them.

    ``output``  [V, H], the target's output layer: the same parameter, neither copied nor saved; for a target sharded
                over ``group``, this rank's rows of it, whose ids are ``ids`` [n] int32
    """

    ids: Tensor

    def __init__(
        self,
        config: MedusaConfig,
        output: MatrixLike,
        dtype: torch.dtype,
        *,
        group: Collectives | None = None,
        ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._group: Collectives = group or SingleRank()
        assert ids is not None or self._group.degree == 1
        if tuple(output.shape) != (-(-config.vocab_size // self._group.degree), config.hidden_size):
            raise WeightShapeError(
                f"heads: expected a target with an output layer of {[config.vocab_size, config.hidden_size]}, got "
                f"{list(output.shape)}; give the heads that were trained for it"
            )
        self.config = config
        self.heads = nn.ModuleList(Head(config, dtype) for _ in range(config.heads))
        if config.tied:
            self.output = output
            if ids is not None and self._group.degree > 1:
                self.register_buffer("ids", ids)

    def forward(self, states: Tensor, linear: Linear, used: int | None = None) -> Tensor:
        """Compute states [B, H] float32 -> logits [B, used, V] float32 of the first ``used`` heads; None = all of
        them.
        """
        return self._whole(self.scores(states, linear, used))

    def scores(self, states: Tensor, linear: Linear, used: int | None = None) -> Tensor:
        """Return logits for this rank's vocabulary shard (`part`)."""
        heads = list(self.heads)[:used]
        ahead = torch.stack([head(states, linear) for head in heads], 1)
        if self.config.tied:
            return linear(ahead, self.output)
        return torch.cat([self.project(i, ahead[:, i : i + 1], linear) for i in range(len(heads))], 1)

    def part(self, scores: Tensor) -> VocabPart:
        """Return the ids of `scores`."""
        if self.config.tied and self._group.degree > 1:
            return VocabPart(self.ids, self.config.vocab_size, self._group)
        return VocabPart.whole(scores)

    def project(self, index: int, x: Tensor, linear: Linear) -> Tensor:
        """Project the output of one head's blocks, [..., H] -> its logits [..., V]."""
        if self.config.tied:
            return self._whole(linear(x, self.output))
        return linear(x, self.get_parameter(f"heads.{index}.projection.weight"))

    def _whole(self, scores: Tensor) -> Tensor:
        return whole(scores, self.config.vocab_size, self._group) if self.config.tied else scores

    def own(self) -> dict[str, nn.Parameter]:
        """Parameters of the heads by name, without the target's output layer."""
        return {name: p for name, p in self.named_parameters() if name.split(".")[0] != "output"}

    @torch.no_grad()
    def fill(self, weights: dict[str, Tensor]) -> None:
        """Copy all weights into the heads; names and shapes must be complete.

        Raises:
            WeightValueError: one holds NaN, infinity or values outside the range of the parameters' type.
        """
        for name, parameter in self.own().items():
            parameter.copy_(check_finite(name, weights[name], parameter.dtype, where=Path("the Medusa heads")))


def fresh(config: MedusaConfig, output: nn.Parameter) -> Heads:
    """Create heads for training, in float32: blocks that do nothing, projections equal to the target's."""
    heads = Heads(config, output, torch.float32)
    start = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    heads.fill({name: output.detach() if name.endswith("projection.weight") else x for name, x in start.items()})
    return heads


def _unknown(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)
