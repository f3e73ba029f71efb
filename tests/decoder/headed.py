"""Generators with random Medusa and EAGLE heads over a tiny target, the same for every backend; no tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from paceline import MedusaDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree
from paceline.medusa import checkpoint
from paceline.medusa.config import MedusaConfig
from tests.decoder.tiny import VOCABULARY
from tests.eagle import heads

TREE = [[0], [1], [0, 0], [0, 1], [1, 0]]


def medusa(
    target: SamplingDecoder,
    folder: Path,
    *,
    tree: Sequence[list[int]] = TREE,
    tied: bool = True,
    fused: bool | None = None,
) -> SpeculativeGenerator:
    """Two heads and a tree."""
    torch.manual_seed(0)
    shape = MedusaConfig(2, 1, target.config.hidden_size, VOCABULARY, tied=tied)
    checkpoint.save(folder, shape, {name: torch.randn(size) * 0.2 for name, size in shape.shapes().items()})
    return SpeculativeGenerator(MedusaDrafter.from_pretrained(folder, target, draft_tree=tree), target, fused=fused)


def eagle(
    target: SamplingDecoder, folder: Path, *, version: int, draft_tree: Callable[[], DraftTree]
) -> SpeculativeGenerator:
    """A random head."""
    return SpeculativeGenerator(heads.drafter(folder, target, version, draft_tree()), target)


SMALL: dict[str, Callable[[SamplingDecoder, Path], SpeculativeGenerator]] = {
    "medusa": partial(medusa, tree=[[0], [1]]),
    "eagle 1": partial(eagle, version=1, draft_tree=lambda: Chain(1)),
}
"""Those whose graphs are short."""
HEADED: dict[str, Callable[[SamplingDecoder, Path], SpeculativeGenerator]] = {
    "medusa": medusa,
    "eagle 1, chain": partial(eagle, version=1, draft_tree=lambda: Chain(2)),
    "eagle 1, static tree": partial(eagle, version=1, draft_tree=lambda: StaticTree((-1, -1, 0, 0, 1))),
    "eagle 2": partial(eagle, version=1, draft_tree=lambda: DynamicTree(5, depth=2, width=2)),
    "eagle 3, chain": partial(eagle, version=3, draft_tree=lambda: Chain(2)),
    "eagle 3, static tree": partial(eagle, version=3, draft_tree=lambda: StaticTree((-1, -1, 0, 0, 1))),
    "eagle 3, dynamic tree": partial(eagle, version=3, draft_tree=lambda: DynamicTree(5, depth=2, width=2)),
}
