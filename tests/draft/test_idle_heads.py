"""Heads leave out slots without a request where kernels can, and draft the same for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.sampling import IDLE_ROW, Sampling, sampling_tensors
from paceline.core.types import Commit
from paceline.draft.heads import HeadDrafter
from paceline.eagle.tree import Chain, DynamicTree, StaticTree
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaDrafter
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices
from tests.decoder.tiny import VOCABULARY, Workshop, fresh
from tests.eagle import heads

SLOTS = 4


def made(kind: str, workshop: Workshop, folder: Path) -> HeadDrafter:
    target = fresh(workshop.checkpoint(), backend="native", batch_size=SLOTS)
    if kind == "medusa":
        torch.manual_seed(2)
        config = MedusaConfig(2, 1, target.config.hidden_size, VOCABULARY, tied=False)
        networks = Heads(config, target.body.model.head, target.options.dtype)
        networks.fill({name: torch.randn(shape) for name, shape in config.shapes().items()})
        return MedusaDrafter(networks, target, Choices.of([[0], [1], [0, 0]]))
    trees = {"chain": Chain(2), "tree": StaticTree((-1, -1, 0)), "dynamic": DynamicTree(4, depth=2, width=2)}
    return heads.drafter(folder, target, 3 if kind == "dynamic" else 1, trees[kind])


@pytest.mark.parametrize("kind", ["chain", "tree", "dynamic", "medusa"])
def test_heads_skip_idle_slots(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    drafter = made(kind, workshop, tmp_path)
    assert drafter.reads is not None
    width = drafter.draft_shape.depth + 1
    features = torch.randn(SLOTS, width, 32 * max(1, len(drafter.reads.layers)))
    tokens = torch.randint(0, VOCABULARY, (SLOTS, width), dtype=torch.int32)
    commit = Commit(tokens, torch.tensor([1, 2, 3, 1], dtype=torch.int32), torch.tensor([5, 9, 1, 4]).int(), features)
    step = drafter.step(drafter.bucket(12), "full")
    caches = [one for pair in drafter.head.caches() for one in pair]

    def propose(idle: list[int]) -> list[list[list[int]]]:
        for cache in caches:
            cache.zero_()
        sampling = sampling_tensors([Sampling(0.8, seed=slot) for slot in range(SLOTS)])
        sampling.params[idle] = torch.tensor(IDLE_ROW)
        with torch.no_grad():
            found = step(commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds, features)
        return [one.tolist() for one in found]

    whole = propose([])
    written = [one.clone() for one in caches]
    for idle in ([1], [0, 2, 3]):
        some = propose(idle)
        for slot in range(SLOTS):
            if slot not in idle:
                assert [part[slot] for part in some] == [part[slot] for part in whole]
            for cache, before in zip(caches, written, strict=True):
                assert not cache[slot].any() if slot in idle else torch.equal(cache[slot], before[slot])


def test_medusa_computes_no_matmul_for_an_idle_slot(workshop: Workshop, tmp_path: Path) -> None:
    drafter = made("medusa", workshop, tmp_path)
    assert isinstance(drafter, MedusaDrafter)
    states, seated = torch.randn(SLOTS, 32), torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    whole, some = drafter.head.parallel(states, 2), drafter.head.parallel(states, 2, seated)
    assert torch.equal(some[[1, 3]], whole[[1, 3]]) and not some[[0, 2]].any()
