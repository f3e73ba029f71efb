"""From what was asked for to a drafter: folders recognised, options checked, loader options taken from the target."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from paceline.auto_drafter import AutoDrafter, make_drafter
from paceline.config import SpeculativeConfig
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.draft.base import FunctionDrafter, NoDrafter
from paceline.draft.choice import FallbackDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.draft_checks import make_rule, recognise
from paceline.eagle.drafter import EagleDrafter
from paceline.medusa import checkpoint as medusa_checkpoint
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaDrafter
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, options_of, resolve
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import checkpoint as eagle_checkpoint
from tests.eagle.heads import config as eagle_config
from tests.eagle.heads import random_head

HOME = Path(__file__).resolve().parents[2] / "examples" / "pycode"


@pytest.fixture
def heads(workshop: Workshop, tmp_path: Path) -> dict[str, str]:
    """A folder of Medusa heads and one of an EAGLE head, for the tiny target."""
    target = workshop.decoder()
    medusa, eagle = tmp_path / "medusa", tmp_path / "eagle"
    for folder in (medusa, eagle):
        folder.mkdir()
    sizes = MedusaConfig(3, 1, target.config.hidden_size, VOCABULARY, tied=True)
    medusa_checkpoint.save(medusa, sizes, {name: torch.zeros(shape) for name, shape in sizes.shapes().items()})
    eagle_checkpoint.save(eagle, random_head(eagle_config(target.config, 3)))
    return {"medusa": str(medusa), "eagle": str(eagle)}


@pytest.mark.parametrize("row", [*DRAFTERS.values(), *ACCEPTANCE_RULES.values()], ids=lambda row: row.name)
def test_every_registry_row_names_a_callable(row: object) -> None:
    assert callable(resolve(row.path))  # type: ignore[attr-defined]
    assert all(isinstance(parameter, inspect.Parameter) for parameter in options_of(row).values())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folder", "name"), [("draft", "model"), ("target", "model"), ("medusa", "medusa"), ("eagle3", "eagle")]
)
def test_drafter_folders_are_recognised(folder: str, name: str) -> None:
    assert recognise(str(HOME / folder)) == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"medusa_num_heads": 3, "base_model_name_or_path": "x"}, "medusa"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, "eagle"),
        ({"speculators_model_type": "eagle3"}, "eagle"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "model"),
    ],
)
def test_folders_of_other_projects_are_recognised(tmp_path: Path, fields: dict, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert recognise(str(tmp_path)) == name


def test_drafter_names_make_their_drafters(workshop: Workshop) -> None:
    target = workshop.decoder()
    for draft, kind, depth in (
        (None, NoDrafter, 0),
        ("none", NoDrafter, 0),
        ("ngram", NgramDrafter, 4),
        ("suffix:k=3", SuffixDrafter, 3),
        (len, FunctionDrafter, 4),
        (["suffix", "ngram:k=6"], FallbackDrafter, 6),
    ):
        drafter, decoders = make_drafter(SpeculativeConfig(draft=draft), target)
        assert (type(drafter), drafter.draft_shape.depth, decoders) == (kind, depth, [])
    assert isinstance(make_drafter(SpeculativeConfig(draft="ngram", k=0), target)[0], NoDrafter)


def test_a_draft_model_is_loaded_with_the_options_of_the_target(workshop: Workshop) -> None:
    target = workshop.decoder(slots=2)
    folder = workshop.checkpoint("draft")
    drafter, (decoder,) = make_drafter(SpeculativeConfig(draft=f"{folder}:k=3"), target)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.draft_shape.depth == 3
    assert decoder.options == target.options
    assert decoder.backend.name == target.backend.name
    _, (other,) = make_drafter(SpeculativeConfig(draft={"path": str(folder), "amp": "bf16", "n_positions": 64}), target)
    assert (other.options.load.amp, other.n_positions, other.batch_size) == ("bf16", 64, 2)


def test_heads_are_loaded_from_their_folders(workshop: Workshop, heads: dict[str, str]) -> None:
    target = workshop.decoder()
    for draft, k, depth in (
        (heads["medusa"], None, 3),
        (heads["medusa"], "auto", 3),
        (heads["medusa"], 2, 2),
        ({"path": heads["medusa"], "draft_tree": [[0], [1], [0, 0]]}, None, 2),
        (heads["eagle"], None, 4),
        (heads["eagle"], (0, 2, 5), 5),
        (heads["eagle"] + ":draft_tree=dynamic:6,3,3", None, 3),
        (heads["eagle"] + ":draft_tree=tree:-1,-1,0,k=2", None, 2),
    ):
        drafter, decoders = make_drafter(SpeculativeConfig(draft=draft, k=k), target)
        assert isinstance(drafter, MedusaDrafter | EagleDrafter)
        assert (drafter.draft_shape.depth, decoders) == (depth, [])
    assert isinstance(AutoDrafter.from_pretrained(heads["eagle"], target, draft_tree="chain", k=2), EagleDrafter)
    assert isinstance(AutoDrafter.from_pretrained(workshop.checkpoint("draft"), target), ModelDrafter)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("ngarm", "expected a folder or one of none, ngram, suffix"),
        ("ngram:size=3", "the draft ngram:size=3: 'size' is not an option; use one of "),
        ("ngram:prefer=last", "prefer: expected"),
        ("suffix:min_match=two", "min_match: expected"),
        (NgramDrafter, "got the class NgramDrafter; give an instance of it"),
        (object(), "draft: expected a drafter's name"),
        ([(NgramDrafter(3), 2)], "has its own k"),
    ],
)
def test_invalid_drafts_are_rejected(workshop: Workshop, draft: object, message: str) -> None:
    with pytest.raises((ConfigurationError, CheckpointError), match=message):
        make_drafter(SpeculativeConfig(draft=draft), workshop.decoder())


def test_heads_that_do_not_fit_are_rejected(workshop: Workshop, heads: dict[str, str]) -> None:
    target = workshop.decoder()
    for options, message in (
        ({"draft": ["ngram", heads["eagle"]]}, "cannot be in a list"),
        ({"draft": heads["eagle"] + ":draft_tree=tree:-1,-1,0", "k": 4}, "expected a draft depth of 2"),
        ({"draft": {"path": str(workshop.checkpoint("draft")), "draft_tree": ""}}, "got ''; correct it"),
        (
            {"draft": f"{workshop.checkpoint('draft')}:draft_tree=tree:-1,-1,0", "k": (0, 2)},
            "expected one number, since .*draft_tree=tree:-1,-1,0 drafts a tree",
        ),
        ({"draft": heads["medusa"], "k": 9}, "got 9; use 1 to 3"),
        ({"draft": heads["medusa"] + ":amp=f32"}, "'amp' is not an option"),
        (
            {"draft": heads["eagle"], "confidence_threshold": 0.5},
            "expected a draft model with it, got none in draft; omit it",
        ),
        (
            {"draft": heads["eagle"], "vocabulary": "intersection"},
            "expected a draft model with it, got none in draft; omit it",
        ),
        (
            {"draft": ["ngram", "suffix"], "acceptor": "reject"},
            "acceptor: expected 'match' for a list of drafters, none of",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make_drafter(SpeculativeConfig(**options), target)


def test_acceptance_rules_are_made_by_name() -> None:
    rules = {name: make_rule(SpeculativeConfig(draft="ngram", acceptor=name)) for name in ("match", "reject")}
    assert all(type(rule) is resolve(ACCEPTANCE_RULES[name].path) for name, rule in rules.items())
    assert make_rule(SpeculativeConfig(draft="ngram", acceptor="typical:epsilon=0.2")) == Typical(epsilon=0.2)
    assert make_rule(SpeculativeConfig(draft="ngram", synthetic_acceptance=0.25)) == SyntheticAcceptance(0.25)
    assert make_rule(SpeculativeConfig(draft="ngram", acceptor=Typical(alpha=0.2))) == Typical(alpha=0.2)
    for rule, message in (
        ("typical:size=2", "'size' is not an option; use one of epsilon, alpha"),
        ("typical:alpha=x", "alpha: expected .*, got 'x'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make_rule(SpeculativeConfig(draft="ngram", acceptor=rule))
