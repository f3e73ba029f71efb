"""The keys of `SpeculativeConfig` and the grammar of drafts, and the drafter and rule that are made of them: what is
understood, and how what is not is rejected.
"""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch

from paceline.auto_drafter import AutoDrafter, make_drafter
from paceline.config import SpeculativeConfig, parse_k
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.draft.base import FunctionDrafter, NoDrafter
from paceline.draft.choice import FallbackDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.draft_checks import make_rule, recognise
from paceline.draft_spec import DraftSpec, RuleSpec, parse_draft, parse_rule
from paceline.eagle.drafter import EagleDrafter
from paceline.medusa import checkpoint as medusa_checkpoint
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaDrafter
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, options_of, resolve
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import checkpoint as eagle_checkpoint
from tests.eagle.heads import config as eagle_config
from tests.eagle.heads import random_head

NGRAM = DraftSpec("ngram", options=(("prompt_lookup_max", 4),))


@pytest.mark.parametrize(
    ("draft", "specs"),
    [
        (None, ()),
        ("none", ()),
        ([], ()),
        ("ngram", (DraftSpec("ngram"),)),
        ("ngram:prompt_lookup_max=4", (NGRAM,)),
        ({"type": "ngram", "prompt_lookup_max": 4}, (NGRAM,)),
        ('{"type": "ngram", "prompt_lookup_max": 4}', (NGRAM,)),
        ("models/small", (DraftSpec(path="models/small"),)),
        (Path("models/small"), (DraftSpec(path="models/small"),)),
        ("./ngram", (DraftSpec(path="./ngram"),)),
        ({"path": "ngram"}, (DraftSpec(path="ngram"),)),
        ("models/small:k=3", (DraftSpec(path="models/small", k=3),)),
        ({"path": "models/small", "k": 3}, (DraftSpec(path="models/small", k=3),)),
        (r"C:\models\small:k=3", (DraftSpec(path=r"C:\models\small", k=3),)),
        ("host:models", (DraftSpec(path="host:models"),)),
        ({"path": "run:k=3"}, (DraftSpec(path="run:k=3"),)),
        ("eagle:path=a/b", (DraftSpec("eagle", "a/b"),)),
        ({"type": "eagle", "path": "a/b"}, (DraftSpec("eagle", "a/b"),)),
        ("a:draft_tree=dynamic:16,4,4,k=4", (DraftSpec(path="a", k=4, options=(("draft_tree", "dynamic:16,4,4"),)),)),
        (
            "a:amp=f32,factor=2.5,flag=true,none=null,sizes=[1,2]",
            (
                DraftSpec(
                    path="a",
                    options=(("amp", "f32"), ("factor", 2.5), ("flag", True), ("none", None), ("sizes", (1, 2))),
                ),
            ),
        ),
        (["suffix", "ngram:k=2", {"path": "a"}], (DraftSpec("suffix"), DraftSpec("ngram", k=2), DraftSpec(path="a"))),
        ('["suffix", "a:k=2"]', (DraftSpec("suffix"), DraftSpec(path="a", k=2))),
        (["none", None, "ngram"], (DraftSpec("ngram"),)),
        (("suffix", "ngram"), (DraftSpec("suffix"), DraftSpec("ngram"))),
        ([("ngram", 2)], (DraftSpec("ngram", k=2),)),
        ([len, (len, 3)], (DraftSpec(value=len), DraftSpec(k=3, value=len))),
    ],
)
def test_every_notation_of_a_draft_is_parsed(draft: object, specs: tuple[DraftSpec, ...]) -> None:
    assert parse_draft(draft) == specs
    assert parse_draft(list(parse_draft(draft))) == specs


@pytest.mark.parametrize("draft", ["ngram:prompt_lookup_max=4", "models/small:k=3,amp=f32", "eagle:path=a/b,k=2"])
def test_a_draft_spec_round_trips(draft: str) -> None:
    (spec,) = parse_draft(draft)
    assert str(spec) == draft


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("", "draft: expected a drafter's name or a folder, got"),
        (":k=3", "draft: expected a drafter's name or a folder, got"),
        (3, "draft: expected a drafter's name or a folder, got"),
        ([True], "draft: expected a drafter's name or a folder, got"),
        ({"k": 3}, "expected `type` .a name. or `path`"),
        ({"type": "ngarm"}, "expected one of none, ngram, suffix.*, got 'ngarm'"),
        ({"type": "function"}, "as the type, got 'function'"),
        ("medusa", "write medusa:path=DIR, or ./medusa"),
        ("ngram:path=a", "no folder for the drafter 'ngram'"),
        ("a:k=0", "k: expected a whole number of at least 1 for draft a, got 0"),
        ([("ngram", 0)], "k: expected a whole number of at least 1"),
        ("a:k=two", "for draft a, got 'two'"),
        ("a:k=true", "for draft a, got True"),
        ("a:k=2,k=3", "draft: expected k once, got it twice in"),
        ([("a:k=2", 3)], "draft: expected k once, got it twice in"),
        ("[1", "draft: expected JSON after the first bracket, got"),
        ('{"type":', "draft: expected JSON after the first bracket, got"),
    ],
)
def test_an_invalid_draft_is_rejected(draft: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SpeculativeConfig(draft=draft)


@pytest.mark.parametrize(
    ("given", "k"),
    [(None, None), ("auto", "auto"), (0, 0), (4, 4), ("4", 4), ("0,2,4", (0, 2, 4)), ([0, 2], (0, 2)), ((3,), 3)],
)
def test_draft_lengths_are_parsed(given: object, k: object) -> None:
    assert parse_k(given) == k


@pytest.mark.parametrize("given", [True, -1, 2.5, "x", "", "4,2", [2, 2], [], [1, None], (1, True)])
def test_invalid_draft_lengths_are_rejected(given: object) -> None:
    with pytest.raises(ConfigurationError, match="ascending numbers"):
        SpeculativeConfig(k=given)


def test_candidate_draft_lengths_are_parsed() -> None:
    auto = SpeculativeConfig(k="auto")
    assert auto.max_k == 8
    assert auto.draft_lengths(8) == (0, 1, 2, 4, 8)
    assert auto.draft_lengths(3) == (0, 1, 2, 3)
    assert auto.draft_lengths(4, (0, 1, 3, 4)) == (0, 1, 3, 4), "what a backend is best at"
    assert SpeculativeConfig(k=(0, 3)).draft_lengths(3) == (0, 3)
    assert SpeculativeConfig(k=3).draft_lengths(3) is None
    assert SpeculativeConfig().max_k == 4


def test_acceptance_rules_are_parsed() -> None:
    assert parse_rule("match") == RuleSpec("match")
    typical = RuleSpec("typical", (("epsilon", 0.1),))
    assert parse_rule("typical:epsilon=0.1") == parse_rule({"type": "typical", "epsilon": 0.1}) == typical
    assert parse_rule(len) == RuleSpec(value=len)
    for wrong in ("typ", 3, None, int):
        with pytest.raises(ConfigurationError, match="expected one of match, reject, typical"):
            SpeculativeConfig(draft="ngram", acceptor=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": 1}, "graph: not an option; use one of draft, k, acceptor, exact, fused"),
        ({"exact": 1}, "exact: expected .*boolean, got 1; .*Use one graph width"),
        ({"fused": "yes"}, "fused: expected .*boolean, got 'yes'"),
        (
            {"draft": "ngram", "confidence_threshold": 1.5},
            "confidence_threshold: expected less than or equal to 1, got 1.5",
        ),
        ({"draft": "ngram", "confidence_threshold": True}, "confidence_threshold: expected .*, got True"),
        ({"draft": "ngram", "confidence_threshold": float("nan")}, "confidence_threshold: expected .*, got nan"),
        ({"draft": "ngram", "synthetic_acceptance": -0.1}, "synthetic_acceptance: expected .*, got -0.1"),
        ({"draft": "ngram", "vocabulary": "other"}, "vocabulary: expected 'same', 'intersection', 'retokenize'"),
        ({"draft": "ngram", "acceptor": "reject", "synthetic_acceptance": 0.5}, "no acceptor with it, got 'reject'"),
        ({"acceptor": "typical"}, "acceptor: expected a drafter with it, got draft=None"),
        ({"synthetic_acceptance": 0.5}, "synthetic_acceptance: expected a drafter"),
        ({"fused": True}, "fused: expected a drafter"),
        ({"confidence_threshold": 0.5}, "confidence_threshold: expected a drafter"),
        ({"draft": "none", "vocabulary": "intersection"}, "vocabulary: expected a drafter"),
    ],
)
def test_unknown_or_contradictory_keys_are_rejected(options: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SpeculativeConfig(**options)


def test_the_configuration_is_a_picklable_value() -> None:
    config = SpeculativeConfig(draft=["ngram", "a:k=2"], k="0,2", acceptor="reject", confidence_threshold=0.25)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.k = 3


def test_a_drafter_is_named_without_its_folders_path() -> None:
    drafts = ["suffix:max_spec_factor=1", "/srv/models/heads/:k=4", {"type": "model", "path": "/srv/small"}]
    assert [spec.label for spec in parse_draft(drafts)] == ["suffix", "heads", "model"]


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
    target, no_model = workshop.decoder(), "expected a draft model with it, got none in draft; omit it"
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
        ({"draft": heads["eagle"], "confidence_threshold": 0.5}, "confidence_threshold: " + no_model),
        ({"draft": heads["eagle"], "vocabulary": "intersection"}, "vocabulary: " + no_model),
        ({"draft": ["suffix", "ngram"], "vocabulary": "retokenize"}, "vocabulary: " + no_model),
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
