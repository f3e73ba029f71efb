"""Times of the graphs of a decoder beside those that arithmetic expects, on the stand-in for the SDK."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from paceline.checks import selftest
from paceline.neuron import round_cost
from tests.decoder.tiny import Workshop, fresh


def test_each_graph_is_timed_and_expected(workshop: Workshop, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    decoder = fresh(workshop.checkpoint(), backend="neuron", batch_size=2)
    decoder.on_graph = lambda _event: None
    decoder.sample([[3, 1, 4]], max_new_tokens=1)
    monkeypatch.setattr(selftest, "CALLS", 3)
    ticks = count()
    assert round_cost.expected_here() is None
    monkeypatch.setattr(round_cost, "instance_family", lambda: "inf2.xlarge")
    found = selftest.graph_times(decoder, round_cost.expected_here(), clock=lambda: 0.001 * next(ticks))
    assert [one.name for one in found] == [graph.name for graph, _ in decoder.graphs()] and found
    for one in found:
        assert one.seconds == pytest.approx(0.001) and one.expected is not None
        assert 437e-6 < one.expected < 0.01, "the host's call, and a tiny model"
    assert str(found[0]).endswith("by arithmetic)") and " 1.00 ms (" in str(found[0])
    assert [one.expected for one in selftest.graph_times(decoder, None)] == [None] * len(found)
