"""The acceptance rule of docs/extending/acceptance.md decides in every mode that it declares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeGenerator, registry
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.errors import ConfigurationError
from tests.docs.extending import written
from tests.fakes import Checked, TableDecoder, near, table

PAGE = "docs/extending/acceptance.md"
TARGET = table(12, seed=0, spread=2.0)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6]]


@pytest.fixture
def at_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class on the page, with its row in the table."""
    monkeypatch.setattr(registry, "ACCEPTANCE_RULES", registry.ACCEPTANCE_RULES)
    before = dict(registry.ACCEPTANCE_RULES)
    exec(written(PAGE, "at_least", tmp_path, monkeypatch), {})
    yield registry.resolve("at_least:AtLeast")
    registry.ACCEPTANCE_RULES.clear()
    registry.ACCEPTANCE_RULES.update(before)
    sys.modules.pop("at_least", None)


def decoders() -> tuple[TableDecoder, TableDecoder]:
    draft = TableDecoder(near(TARGET, seed=1, spread=0.6), slots=3, kv_buckets=(256,))
    return draft, TableDecoder(TARGET, slots=3, kv_buckets=(256,))


@pytest.mark.parametrize("fused", [None, False])
def test_the_example_rule_decides_acceptance(at_least: Any, fused: bool | None) -> None:
    assert isinstance(at_least(), AcceptanceRule)
    asked = {"max_new_tokens": 40, "do_sample": True, "seed": 1}
    everything = Checked(*decoders(), k=3, acceptor=at_least(0.0), fused=fused)
    everything.sample(PROMPTS, **asked)
    statistics = everything.statistics
    assert statistics.num_accepted_tokens > 0.9 * statistics.num_draft_tokens, "all but what the length cuts"
    assert (statistics.acceptor, statistics.lossless) == ("at-least", False)
    nothing = Checked(*decoders(), k=3, acceptor=at_least(1.1), fused=fused)
    sequences = nothing.sample(PROMPTS, **asked)
    assert nothing.statistics.num_accepted_tokens == 0
    plain = Checked(None, decoders()[1]).sample(PROMPTS, **asked)
    assert torch.equal(sequences, plain), "a rule that accepts nothing leaves the target's own choices"


def test_declarations_of_the_example_rule_are_enforced(at_least: Any) -> None:
    generator = SpeculativeGenerator(*decoders(), k=3, acceptor=at_least(0.5))
    with pytest.raises(ConfigurationError, match="decides on the device"):
        generator.sample(PROMPTS, repetition_penalty=1.5)
    with pytest.raises(ConfigurationError, match="expected one of"):
        SpeculativeGenerator(*decoders(), acceptor=at_least)


def test_a_registry_row_names_the_example_rule_with_options(at_least: Any) -> None:
    generator = SpeculativeGenerator(*decoders(), k=3, acceptor="at-least:least=0.0")
    generator.sample(PROMPTS, max_new_tokens=12)
    assert generator.statistics.acceptor == "at-least" and generator.statistics.num_accepted_tokens


def test_rows_declare_what_their_classes_do(at_least: Any) -> None:
    for row in registry.ACCEPTANCE_RULES.values():
        rule = registry.resolve(row.path)
        for name in ("name", "needs", "draft_probs", "lossless", "trees", "on_host"):
            assert getattr(row, name) == getattr(rule, name), (row.name, name)
