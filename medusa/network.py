"""Medusa heads: from one state of the target to the logits of several tokens ahead.

A head is a number of residual blocks, x + silu(W x + b), then a projection to the vocabulary: its own, or the target's
output layer.
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
from paceline.heads.trainable import register
from paceline.medusa.config import MedusaConfig

Linear = Callable[[Tensor, MatrixLike], Tensor]
"""x [..., in], weight [out, in] -> [..., out]"""


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
        for name, shape in config.shapes().items():
            register(self, name, torch.full(shape, float("nan"), dtype=dtype))
        self.requires_grad_(False)
        if config.tied:
            self.output = output
            if ids is not None and self._group.degree > 1:
                self.register_buffer("ids", ids)

    def forward(self, states: Tensor, linear: Linear, used: int | None = None) -> Tensor:
        """Compute states [B, H] float32 -> logits [B, used, V] float32 of the first ``used`` heads; None = all."""
        return self._whole(self.scores(states, linear, used))

    def scores(self, states: Tensor, linear: Linear, used: int | None = None) -> Tensor:
        """Return logits for this rank's vocabulary shard (`part`)."""
        heads = range(self.config.heads)[:used]
        ahead = torch.stack([self.hidden(head, states, linear) for head in heads], 1)
        if self.config.tied:
            return linear(ahead, self.output)
        return torch.cat([linear(ahead[:, head : head + 1], self._of(head, "projection.weight")) for head in heads], 1)

    def hidden(self, head: int, x: Tensor, linear: Linear) -> Tensor:
        """Apply the blocks of one head: [..., H] -> [..., H]"""
        for block in range(self.config.layers):
            weight, bias = (self._of(head, f"blocks.{block}.{kind}") for kind in ("weight", "bias"))
            x = x + nn.functional.silu(linear(x, weight) + bias)
        return x

    def _of(self, head: int, name: str) -> nn.Parameter:
        return self.get_parameter(f"heads.{head}.{name}")

    def part(self, scores: Tensor) -> VocabPart:
        if self.config.tied and self._group.degree > 1:
            return VocabPart(self.ids, self.config.vocab_size, self._group)
        return VocabPart.whole(scores)

    def _whole(self, scores: Tensor) -> Tensor:
        return whole(scores, self.config.vocab_size, self._group) if self.config.tied else scores

    def own(self) -> dict[str, nn.Parameter]:
        """Parameters of the heads by name, without the target's output layer."""
        return {name: p for name, p in self.named_parameters() if name.split(".")[0] != "output"}

    @torch.no_grad()
    def fill(self, weights: dict[str, Tensor]) -> None:
        """Copy all weights into the heads; names and shapes must be complete."""
        for name, parameter in self.own().items():
            parameter.copy_(check_finite(name, weights[name], parameter.dtype, where=Path("the Medusa heads")))


def fresh(config: MedusaConfig, output: nn.Parameter) -> Heads:
    """Create heads for training, in float32: blocks that do nothing, projections equal to the target's."""
    heads = Heads(config, output, torch.float32)
    start = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    heads.fill({name: output.detach() if name.endswith("projection.weight") else x for name, x in start.items()})
    return heads
