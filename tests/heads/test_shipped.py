"""The heads of examples/pycode: they are recognised, change no token, and draft about as well as published."""

from __future__ import annotations

import json

import pytest

from paceline import Chain, DynamicTree, EagleDrafter, MedusaDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.protocols import Drafter
from paceline.eagle.config import is_eagle_config
from paceline.medusa.config import is_medusa_config
from paceline.medusa.tree import Choices
from tests import shipped
from tests.equality.settings import Setting, plain, run, texts
from tests.shipped import FOLDER

MEDUSA, EAGLE = FOLDER / "medusa", FOLDER / "eagle3"
SAMPLED: Setting = {"do_sample": True, "temperature": 1.0, "seed": 2}


@pytest.fixture(scope="module")
def target(compile_cache: None) -> SamplingDecoder:
    return shipped.target()


def drafter(name: str, target: SamplingDecoder) -> Drafter:
    if name == "medusa":
        return MedusaDrafter.from_pretrained(MEDUSA, target, draft_tree=MEDUSA / "tree-8.json")
    tree = DynamicTree(8, depth=4, width=3) if name == "eagle3, grown tree" else Chain(3)
    return EagleDrafter.from_pretrained(EAGLE, target, tree)


@pytest.mark.parametrize(
    ("name", "setting", "tau"),
    [
        ("medusa", {}, 1.4),  # published, greedily: 2.06
        ("medusa", SAMPLED, 1.0),
        ("eagle3", {}, 1.3),  # 2.47
        ("eagle3, grown tree", SAMPLED, 1.3),  # 2.92
    ],
)
def test_shipped_heads_draft_well(target: SamplingDecoder, name: str, setting: Setting, tau: float) -> None:
    """A few short texts stray from the published tokens per round, but damaged heads give about 1."""
    prompts = shipped.prompts(slice(3, 5))
    result = run(SpeculativeGenerator(drafter(name, target), target), setting, prompts=prompts, new=40)
    assert texts(result) == plain(target, setting, prompts=prompts, new=40)
    assert result.statistics.tau > tau


@pytest.mark.parametrize("name", ["target", "draft", "medusa", "eagle3"])
def test_a_folder_says_which_heads_it_holds(name: str) -> None:
    fields = json.loads((FOLDER / name / "config.json").read_text())
    assert (is_medusa_config(fields), is_eagle_config(fields)) == (name == "medusa", name == "eagle3")


def test_every_shipped_tree_fits_and_has_the_nodes_of_its_name() -> None:
    trees = {int(file.stem.removeprefix("tree-")): Choices.read(file) for file in MEDUSA.glob("tree-*.json")}
    for size, tree in trees.items():
        tree.check(heads=4, top=10)
        assert len(tree) == size
    assert Choices.read(MEDUSA / "tree.json") in trees.values()


def test_acceptance_of_the_shipped_head_falls_with_depth() -> None:
    shares = json.loads((EAGLE / "acceptance.json").read_text())["greedy chains"]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and shares[-1] > 0 and shares[0] < 1
