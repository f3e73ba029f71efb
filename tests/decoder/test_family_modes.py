"""Families of every choice on two ranks, each way to draft in one of them; others meet in the equality matrix.

The wanted tokens are those of the whole model on one rank. Sums of partial products are rounded otherwise than a whole
product, so that equal tokens are what is to be expected but at a near-tie; modes of one degree do not differ at all.
What is drafted and accepted is the same on one rank and on two, which a draft that computes something else would
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.eagle.tree import Chain, DynamicTree, StaticTree
from tests.decoder import headed
from tests.decoder.families import FAMILIES, NEAR, save_pair
from tests.eagle import heads

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 2, [5, 5]]  # of unequal length; the longer one is longer than a sliding window
NEW = 8
DIFFERENT = [name for name in FAMILIES if name not in NEAR]
SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "seed": 3},
}
Tokens = list[list[int]]


def load(folder: Path, degree: int, **more: object) -> SamplingDecoder:
    asked = {"backend": "eager", "amp": "f32", "batch_size": 2, "context_length_estimate": [16], **more}
    return AutoDecoder.from_pretrained(folder, tp_degree=degree, **asked)  # type: ignore[arg-type]


def tokens(source: SamplingDecoder | SpeculativeGenerator, setting: str) -> Tokens:
    found: Tokens = source.sample(PROMPTS, max_new_tokens=NEW, **SETTINGS[setting]).tolist()  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Divided:
    """A family's target and draft: whole, and on two ranks."""

    whole: SamplingDecoder
    target: SamplingDecoder
    whole_draft: SamplingDecoder
    draft: SamplingDecoder
    wanted: dict[str, Tokens]


@pytest.fixture(scope="module", params=DIFFERENT)
def family(
    two_ranks: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Divided]:
    folders = save_pair(tmp_path_factory.mktemp("family"), request.param)
    whole, whole_draft = (load(one, 1) for one in folders)
    target, draft = (load(one, 2) for one in folders)
    yield Divided(whole, target, whole_draft, draft, {setting: tokens(whole, setting) for setting in SETTINGS})
    draft.close()
    target.close()


Make = Callable[[Divided, SamplingDecoder, Path], SpeculativeGenerator]


def eagle(version: int, tree: Callable[[], object], *, divided: bool | None = None) -> Make:
    def make(_: Divided, target: SamplingDecoder, folder: Path) -> SpeculativeGenerator:
        own = divided if target.options.layout.degree > 1 else None
        drafter = heads.drafter(folder, target, version, tree(), divided=own)
        return SpeculativeGenerator(drafter, target)

    return make


def of_model(degree: int, *, fused: bool) -> Make:
    def make(pair: Divided, target: SamplingDecoder, _: Path) -> SpeculativeGenerator:
        own = pair.draft if degree == target.options.layout.degree == 2 else pair.whole_draft
        return SpeculativeGenerator(own, target, k=3, fused=fused)

    return make


MODES: dict[str, Make] = {
    "draft model, one graph": of_model(2, fused=True),
    "whole draft model": of_model(1, fused=False),
    "n-grams": lambda _, target, __: SpeculativeGenerator("ngram", target, k=3),
    "medusa, static tree": lambda _, target, folder: headed.medusa(target, folder),
    "eagle 1, static tree": eagle(1, lambda: StaticTree((-1, -1, 0, 0, 1)), divided=True),
    "eagle 3, chain": eagle(3, lambda: Chain(2), divided=True),
    "eagle 3, dynamic tree": eagle(3, lambda: DynamicTree(5, depth=2, width=2)),
}


CASES = list(zip(DIFFERENT, MODES, strict=False))


def test_plain_decoding_of_every_family(family: Divided) -> None:
    for setting, wanted in family.wanted.items():
        assert tokens(family.target, setting) == wanted
    assert family.wanted["greedy"] != family.wanted["sampled"]


@pytest.mark.parametrize(("family", "mode"), CASES, indirect=["family"], scope="module")
def test_every_mode_keeps_the_tokens_of_a_family(family: Divided, tmp_path: Path, mode: str) -> None:
    generators = [MODES[mode](family, target, tmp_path) for target in (family.whole, family.target)]
    for setting, wanted in family.wanted.items():
        drafted = []
        for generator in generators:
            assert tokens(generator, setting) == wanted
            seen = generator.statistics
            drafted.append((seen.num_draft_tokens, seen.num_accepted_tokens_per_pos))
        assert drafted[0] == drafted[1]
        assert drafted[0][0] > 0
