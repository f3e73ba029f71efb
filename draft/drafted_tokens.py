"""The tokens that a drafting step has chosen so far: a chain, or a tree of the best tokens of each position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import noise, probs, tree
from paceline.core.types import PAD, SamplingTensors
from paceline.decoder.kernels.protocol import Kernels


@dataclass(frozen=True, slots=True)
class Kept:
    """Values of its choices that a step uses in addition to the tokens.

    drawn       sample from the head's probabilities and report them; otherwise choose with the target's noise
    confidence  from the first position whose largest probability (no temperature, no filter) is below it, drafts are
                PAD
    reports     also return these probabilities, [B, k] float32, of all positions
    parents     of a tree of the best tokens of each position; (): a chain of the first ones
    """

    drawn: bool = False
    confidence: float = 0.0
    reports: bool = False
    parents: tuple[int, ...] = ()

    @property
    def tokens_only(self) -> bool:
        return not (self.drawn or self.confidence or self.reports or self.parents)

    def nodes(self) -> Tensor:
        """Places of the tree's tokens, `tree.best_of_positions`, [N] int32: a buffer of the step."""
        places = tree.best_of_positions(self.parents)[1] if self.parents else []
        return torch.tensor(places, dtype=torch.int32)


class DraftedTokens:
    """The tokens that a step has chosen so far, with what is kept of their choice.

    sampling  of the next choice
    nodes     `Kept.nodes`, of a tree
    """

    def __init__(self, kernels: Kernels, sampling: SamplingTensors, kept: Kept, *, nodes: Tensor | None = None) -> None:
        self._kernels, self.sampling, self._kept, self._nodes = kernels, sampling, kept, nodes
        self._ranked: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._distributions: list[Tensor] = []
        self._largest: list[Tensor] = []

    @property
    def last(self) -> Tensor:
        return self._tokens[-1]

    def add(self, tokens: Tensor) -> None:
        self._tokens.append(tokens)

    def choose(self, logits: Tensor, positions: Tensor) -> None:
        """Choose and append tokens: logits [B, n, V] of positions [B, n] int32."""
        kept = self._kept
        if kept.parents:
            most = tree.best_of_positions(kept.parents)[0]
            ranked, _ = self._kernels.rank_tokens(logits.contiguous(), positions, self.sampling, count=most)
            self._ranked.append(ranked)
            self.add(ranked[..., 0])
            return
        if kept.confidence > 0 or kept.reports:
            self._largest.append(probs.softmax(logits).amax(-1))
        stream = noise.DRAFT if kept.drawn else noise.TARGET
        if kept.drawn:
            self._distributions.append(self._kernels.probabilities(logits, self.sampling))
        self.add(self._kernels.sample_tokens(logits, positions, self.sampling, stream=stream))

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the drafts [B, k] int32, their probabilities [B, k, V] if they are sampled, and those of ``reports``;
        or a tree's [B, N].
        """
        if self._kept.parents:
            assert self._nodes is not None, "a step of a tree has them"
            return (torch.cat(self._ranked, 1).flatten(1).index_select(1, self._nodes),)
        kept, chain = self._kept, torch.cat(self._tokens, 1)
        if kept.confidence > 0:
            doubts = (~(torch.cat(self._largest, 1) >= kept.confidence)).to(torch.float32).cumsum(-1)
            chain = torch.where(doubts == 0, chain, PAD)
        out = (chain, torch.cat(self._distributions, 1)) if kept.drawn else (chain,)
        return (*out, torch.cat(self._largest, 1)) if kept.reports else out
