"""Accuracy of heads, measured on kept windows, and the best tree of a given number of nodes for that accuracy.

The expected number of accepted tokens of a tree is the sum over its nodes of the probability that the whole path to
the node is right, and a path is never likelier than its prefix. So taking the likeliest node next, again and again,
gives the best tree of every size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.heads.frozen_model import Texts
from paceline.heads.layouts import write_json
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices

TOP = 10
"""Number of ranks that are examined, as in Medusa's trees."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Ranks [n, heads] int64 of the target's token in each head at n positions; `TOP`: not among the best."""

    ranks: Tensor

    @property
    def places(self) -> int:
        return len(self.ranks)

    def top(self) -> list[list[float]]:
        """Share of positions at which the token is among the best 1, 2, ... `TOP`, for every head."""
        return [
            [float((self.ranks[:, head] <= rank).double().mean()) for rank in range(TOP)]
            for head in range(self.ranks.shape[1])
        ]

    def write(self, path: Path) -> None:
        table = [[round(share, 4) for share in row] for row in self.top()]
        write_json(path, {"places": self.places, "top": table})


@torch.no_grad()
def measure(heads: Heads, texts: Sequence[Texts], output: Tensor) -> Accuracy:
    """Return ranks at every position of the sequences whose following tokens count.

    ``output`` [V, H] is the target's output layer. A position counts if the sequence itself is the target's greedy
    output up to the last head's token: a greedy decoder would not reach others.
    """
    ranks = []
    count = heads.config.heads
    for every in texts:
        for at in range(0, len(every), 8):
            part = every.part(slice(at, at + 8)).to(str(output.device))
            tokens, states = part.tokens, part.last.float()
            choices = (states @ output.T).argmax(-1)  # [n, L]; of the token after each position
            last = tokens.shape[1] - count - 1
            agreed = choices[:, :-1] == tokens[:, 1:]
            if part.counted is not None:  # the tokens of all heads must be ones that are drafted
                agreed &= part.counted[:, 1:]
            all_agreed = torch.stack([agreed[:, i : last + i] for i in range(count)], -1).all(-1)  # [n, last]
            targets = torch.stack([choices[:, i + 1 : last + i + 1] for i in range(count)], -1)[all_agreed]
            logits = heads(states[:, :last][all_agreed], torch.nn.functional.linear)
            target_logits = logits.gather(-1, targets.unsqueeze(-1))
            ranks.append((~(logits <= target_logits)).sum(-1).clamp(max=TOP).cpu())  # NaN is never right
    if not sum(map(len, ranks)):
        raise ConfigurationError(
            "data: expected at least one sequence long enough to evaluate the heads, got none; give more or longer ones"
        )
    return Accuracy(torch.cat(ranks))


Children = Callable[[tuple[int, ...]], list[float]]
"""Returns, for a path, the probability of the path followed by rank 0, 1, 2, ...; empty below the last head."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tree, and the expected number of its accepted nodes per round."""

    choices: Choices
    accepted: float

    @property
    def tau(self) -> float:
        """Tokens per round, including the target's own."""
        return 1.0 + self.accepted


def best(children: Children, nodes: int) -> Found:
    """Return the best tree of ``nodes`` nodes, or of fewer if all others have probability 0; ConfigurationError: every
    path has.
    """
    if nodes < 1:
        raise ConfigurationError(f"nodes: expected at least 1, got {nodes}; raise it")
    paths: list[tuple[int, ...]] = []
    total = 0.0
    # Of equal probability, the shorter path and the lower ranks come first, so that a search gives the same tree twice.
    heap = _offers((), children)
    heapq.heapify(heap)
    while heap and len(paths) < nodes:
        minus, _, path = heapq.heappop(heap)
        paths.append(path)
        total -= minus
        for offer in _offers(path, children):
            heapq.heappush(heap, offer)
    if not paths:
        raise ConfigurationError(
            "heads: expected some correct predictions, got none, so every tree would lower the speed; train the "
            "heads first"
        )
    return Found(Choices.of(paths), total)


def by_places(ranks: Tensor, *, top: int) -> Children:
    """Return probabilities of whole paths, counted at positions: ranks [n, heads] of the right token, ``top`` or more
    if it is not among the best. Correlations between heads are included.
    """

    def children(path: tuple[int, ...]) -> list[float]:
        if len(path) == ranks.shape[1] or not len(ranks):
            return []
        below = ranks
        for level, rank in enumerate(path):
            below = below[below[:, level] == rank]
        counts = below[:, len(path)].clamp(max=top).bincount(minlength=top + 1)[:top]
        return [count / len(ranks) for count in counts.tolist()]

    return children


def by_heads(top: Sequence[Sequence[float]]) -> Children:
    """Return probabilities from a table: top[h][r] is the share of positions at which head h has the token among its
    best r + 1. Assumes independent heads, as for Medusa's own trees.
    """
    single = [[share - before for before, share in zip([0.0, *row], row, strict=False)] for row in top]

    def children(path: tuple[int, ...]) -> list[float]:
        if len(path) == len(single):
            return []
        before = 1.0
        for level, rank in enumerate(path):
            before *= single[level][rank]
        return [before * share for share in single[len(path)]]

    return children


def expected(choices: Choices, children: Children) -> float:
    """Return the expected number of accepted nodes of a given tree per round."""
    return sum(children(path[:-1])[path[-1]] for path in choices.paths)


def _offers(path: tuple[int, ...], children: Children) -> list[tuple[float, int, tuple[int, ...]]]:
    return [(-p, len(path) + 1, (*path, rank)) for rank, p in enumerate(children(path)) if p > 0]
