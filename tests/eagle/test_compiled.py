"""EAGLE's graphs through the compiler: one fused round of a dynamic tree, in the batch and number format of others."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline import SpeculativeGenerator
from paceline.eagle.tree import DynamicTree
from tests.decoder.tiny import Workshop
from tests.eagle.heads import drafter

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9], list(range(20, 32))]


def test_compiled_rounds_give_the_tokens_and_drafts_of_eager_ones(workshop: Workshop, tmp_path: Path) -> None:
    draft_tree = DynamicTree(4, depth=2, width=2)
    generators = {
        backend: SpeculativeGenerator(
            drafter(tmp_path / backend, workshop.decoder(backend=backend), 3, draft_tree),
            workshop.decoder(backend=backend),
        )
        for backend in ("eager", "native")
    }
    plain = workshop.decoder(backend="eager")
    for sampling in ({}, {"do_sample": True, "temperature": 1.0, "seed": 11}):
        wanted = plain.sample(PROMPTS, max_new_tokens=20, **sampling)
        accepted = []
        for backend, generator in generators.items():
            made = generator.sample(PROMPTS, max_new_tokens=20, **sampling)
            assert torch.equal(made, wanted), (backend, sampling)
            accepted.append((generator.statistics.num_rounds, generator.statistics.num_accepted_tokens))
        assert accepted[0] == accepted[1], "the compiled head drafts what the eager one drafts"
