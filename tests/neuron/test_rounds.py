"""Several rounds in one graph on the stand-in: commits stay on the device, and the host calls and fetches once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.decoder.environment import neuron_rounds
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.neuron.test_backend import PROMPTS, pair


def test_one_call_and_one_look_for_several_rounds(
    workshop: Workshop, runtime: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    k, slots, rounds, asked = 2, 2, 2, {"max_new_tokens": 14}
    monkeypatch.setenv("PACELINE_NEURON_ROUNDS", str(rounds))
    found = []
    for backend in ("eager", "neuron"):
        generator = SpeculativeGenerator(*pair(workshop, backend), k=k)
        done = generator.sample(PROMPTS, return_dict=True, **asked)
        found.append((done.sequences.tolist(), done.statistics.num_rounds, done.statistics.num_accepted_tokens_per_pos))
    assert found[0] == found[1] and found[0][1]
    report, alone = (k + 1 + 2) * slots * 4, (k + 1 + 1) * slots * 4
    # No logits come out of rounds. One in which nothing can be accepted has no draft in it.
    calls = [(entered, left) for _, entered, left in runtime().calls if left < VOCABULARY * 4 and left != alone]
    assert {left for _, left in calls} == {report, rounds * report}
    assert sum(left == rounds * report for _, left in calls) >= 2
    # A call takes the commit, the limits, and how each slot samples: as much for several rounds as for one.
    assert {entered for entered, _ in calls} == {((k + 1) + 3 + 4 + 4) * slots * 4}


def test_how_many_rounds_is_a_number_from_1_to_32(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "1", "32"):
        monkeypatch.setenv("PACELINE_NEURON_ROUNDS", value)
        assert neuron_rounds() == int(value or 1)
    for value in ("0", "33", "-1", "all"):
        monkeypatch.setenv("PACELINE_NEURON_ROUNDS", value)
        with pytest.raises(ConfigurationError, match=f"PACELINE_NEURON_ROUNDS='{value}' must be a number from 1"):
            neuron_rounds()
