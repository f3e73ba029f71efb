"""Token trees: nodes in an order where parents come before children, without the root (the last committed token).

A tree of N nodes is a tuple of N parents; parent -1 is the root. A chain of k is (-1, 0, 1, ..., k - 2). Row 0 of a
window is the root and row n + 1 is node n. In a graph a tree is a tensor of parent rows, -1 for the root's own.
See `paceline.eagle.tree` for growing trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape, Proposal

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1


def chain(length: int) -> tuple[int, ...]:
    return tuple(range(-1, length - 1))


def is_chain(parents: tuple[int, ...]) -> bool:
    return parents == chain(len(parents))


def check(parents: tuple[int, ...]) -> None:
    """Raise ConfigurationError unless every parent comes before its child."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ConfigurationError(
                f"tree: expected -1 (the root) or an earlier node as the parent of node {node}, got {parent}; "
                "reorder the nodes"
            )


def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of every node; children of the root have depth 1."""
    depth_of: list[int] = []
    for parent in parents:
        depth_of.append(1 if parent == ROOT else depth_of[parent] + 1)
    return tuple(depth_of)


def best_of_positions(parents: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return the tokens of a tree that has the best ones of each position: how many are ranked at each, and for every
    node the place of its token among those of all positions in order.

    A node at depth d that is child r of its parent is the token of rank r at position d, whatever its parent.
    """
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    most = 1 + max(ranks)
    return most, [(depth - 1) * most + rank for depth, rank in zip(depths(parents), ranks, strict=True)]


def draft_shape(parents: tuple[int, ...]) -> DraftShape:
    """Return the draft shape of a static tree; ConfigurationError: a parent does not come before its child."""
    check(parents)
    if is_chain(parents):
        return DraftShape.chain(len(parents))
    return DraftShape(len(parents), max(depths(parents)), parents)


def verify_rows(parents: tuple[int, ...]) -> list[int]:
    return [ROOT, *(parent + 1 for parent in parents)]


def parents_of(proposal: Proposal) -> Tensor:
    """Return the parent nodes of a proposal in every slot, -1 for the root. -> [B, N] int32"""
    import torch

    slots, nodes = proposal.tokens.shape
    parents, device = proposal.parents, proposal.tokens.device
    if parents is None:
        parents = torch.arange(-1, nodes - 1, dtype=torch.int32, device=device)
    elif isinstance(parents, tuple):
        parents = torch.tensor([parents], dtype=torch.int32, device=device)
    return parents.expand(slots, nodes)


def ancestor_mask(rows: Tensor) -> Tensor:
    """Map parent rows [B, T] int32 -> [B, T, T] float32: 1 where row j is row i or an ancestor of it.

    It squares the matrix of steps towards the root: only matmuls, no loop whose length depends on the data.
    """
    import torch

    size = rows.shape[1]
    ids = torch.arange(size, dtype=torch.int32, device=rows.device)
    reached = (rows.unsqueeze(-1) == ids).to(torch.float32) + (ids.unsqueeze(-1) == ids).to(torch.float32)
    steps = 1
    while steps < size - 1:
        reached = (reached @ reached).clamp(max=1.0)
        steps *= 2
    return reached
