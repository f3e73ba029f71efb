"""Draft-ahead without a process: what is ready and what is dropped, for drafters that are right or wrong."""

from __future__ import annotations

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.placement.ahead import Ahead
from paceline.placement.health import DrafterHealth
from tests.fakes import Checked, TableDecoder
from tests.placement.faulty import DRAFT, TARGET, drafter

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(("kind", "least", "most"), [("itself", 1.0, 1.0), ("never", 0.0, 0.0), ("often", 0.01, 0.9)])
def test_work_is_ready_exactly_when_all_of_it_was_right(kind: str, least: float, most: float) -> None:
    """The target as its own draft is always right; one that takes the least likely token never is."""
    logits: torch.Tensor = {"itself": TARGET, "never": -TARGET, "often": DRAFT}[kind]
    ahead = Ahead(drafter(1, 3, logits))
    generator = Checked(ahead, TableDecoder(TARGET))
    hits, found = [], list(PROMPT)
    for event in generator.stream([PROMPT], max_new_tokens=45):
        found += event.tokens
        hits.append(ahead.hit)
        ahead.work()
    expected = SpeculativeGenerator(None, TableDecoder(TARGET)).sample([PROMPT], max_new_tokens=45)
    assert [found] == expected.tolist()  # type: ignore[union-attr]
    later = hits[2:-1]  # nothing can be ready for the prompt and the first round; the last may be cut short
    assert len(later) > 8 and least <= sum(later) / len(later) <= most


def test_the_hit_rate_is_in_the_statistics() -> None:
    health = DrafterHealth(answered=8, ahead=6).since(DrafterHealth(answered=4, ahead=3))
    assert health.hit_rate == 0.75 and health.to_dict()["hit_rate"] == 0.75
    assert DrafterHealth().hit_rate == 0.0
