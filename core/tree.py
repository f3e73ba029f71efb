"""Token trees: nodes in an order where parents come before children, the root (the last committed token) left out.

A tree of N nodes is a tuple of N parents; parent -1 is the root. A chain of k is (-1, 0, 1, ..., k - 2). Row 0 of a
window is the root and row n + 1 is node n. Not here: how a tree is grown, and attention under its mask.
"""

from __future__ import annotations

from paceline.core.errors import ConfigurationError

ROOT = -1


def chain(length: int) -> tuple[int, ...]:
    """Parents of a chain of ``length`` nodes."""
    return tuple(range(-1, length - 1))


def is_chain(parents: tuple[int, ...]) -> bool:
    """Whether every node hangs on the one before it."""
    return parents == chain(len(parents))


def check(parents: tuple[int, ...]) -> None:
    """Raise ConfigurationError unless every parent stands before its child."""
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise ConfigurationError(
                f"node {node} of a token tree has parent {parent}; a parent is -1 (the root) or an earlier node"
            )


def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of every node; children of the root have depth 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return tuple(found)


def ancestors(parents: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    """N x N table: entry [n][m] says whether node m is node n or one of its ancestors (the root is left out)."""
    rows: list[tuple[bool, ...]] = []
    for node, parent in enumerate(parents):
        above = (False,) * len(parents) if parent == ROOT else rows[parent]
        rows.append(tuple(m == node or seen for m, seen in enumerate(above)))
    return tuple(rows)
