"""The keys of `SpeculativeConfig` and the grammar of drafts: what is understood, and how what is not is rejected."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from paceline.config import SpeculativeConfig, parse_k
from paceline.core.errors import ConfigurationError
from paceline.draft_spec import DraftSpec, RuleSpec, parse_draft, parse_rule

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
        ({"draft": "ngram", "vocabulary": "other"}, "vocabulary: expected 'same'"),
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
