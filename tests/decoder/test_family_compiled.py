"""Families other than Llama in compiled graphs: the tokens of eager, and those of plain decoding in every mode.

Each family is one that asks its kernels for something that Llama does not: learned positions, biases and layer norms
(GPT-2), experts (Qwen3-MoE), a sliding layer beside a full one with scaled scores and capped logits (Gemma 3). Each has
a drafter of another kind. What graphs do not change is tried on eager (`test_family_modes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.eagle.tree import DynamicTree
from tests.decoder import headed
from tests.decoder.families import save_pair
from tests.decoder.test_family_modes import tokens

Make = Callable[[SamplingDecoder, Path, Path], SpeculativeGenerator]


def load(folder: Path, backend: str) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(folder, backend=backend, amp="f32", batch_size=2, context_length_estimate=[16])


def drafted(target: SamplingDecoder, draft: Path, _: Path) -> SpeculativeGenerator:
    return SpeculativeGenerator(load(draft, target.backend.name), target, k=3)


def medusa(target: SamplingDecoder, _: Path, folder: Path) -> SpeculativeGenerator:
    return headed.medusa(target, folder)


def eagle(target: SamplingDecoder, _: Path, folder: Path) -> SpeculativeGenerator:
    return headed.eagle(target, folder, version=3, draft_tree=lambda: DynamicTree(5, depth=2, width=2))


CASES: dict[str, tuple[str, Make, list[str]]] = {
    "gpt2, draft model": ("gpt2", drafted, ["greedy", "sampled"]),
    "qwen3 moe, eagle 3": ("qwen3 moe", eagle, ["sampled"]),
    "gemma3, medusa": ("gemma3", medusa, ["greedy"]),
}
"""A family, its drafter, and the settings: each of them has graphs of its own to be compiled."""


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_family(tmp_path: Path, case: str) -> None:
    name, make, settings = CASES[case]
    target_folder, draft_folder = save_pair(tmp_path, name, layers=2)
    target = load(target_folder, "native")
    generator = make(target, draft_folder, tmp_path / "heads")
    for setting in settings:
        plain = tokens(target, setting)
        assert plain == tokens(load(target_folder, "eager"), setting)
        assert tokens(generator, setting) == plain
    assert generator.statistics.num_draft_tokens > 0
