"""The simulated cluster of `benchmarks.scale`, small."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from benchmarks.scale import run
from paceline.placement import INSTANCES

LARGE = INSTANCES["inf2.48xlarge"]


def test_the_scale_simulation_runs() -> None:
    report = run(LARGE, 4)
    full, replaced = report["place"], report["replace"]
    assert isinstance(full, dict) and isinstance(replaced, dict)
    assert full["used_share"] > 0.9 and replaced["nodes"] == 4
