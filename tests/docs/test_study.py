"""docs/study.md shows what benchmarks/results/study.json holds, and every block can be made of figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import study_page

        yield study_page
    for name in ("study_page", "study_charts", "report_charts", "report_tables"):
        sys.modules.pop(name, None)


def test_the_page_shows_the_figures(study: ModuleType) -> None:
    figures = json.loads(study.FIGURES.read_text())
    texts = [page.read_text() for page in study.PAGES]
    assert [study.page(text, figures) for text in texts] == texts, "make it again: python scripts/study_page.py"
    assert study.study_charts.stale(figures, study.IMAGES) == []
    assert all(f"<!-- study:{name} -->" in "".join(texts) for name in study.BLOCKS)


def test_times_of_a_busy_machine_are_said_to_be_so(study: ModuleType) -> None:
    names = {"target": "a", "drafter": "b", "k": 2, "sampling": "greedy", "batch_size": 1, "speedup": 1.25}
    cells: list[dict[str, Any]] = [{**names, "provenance": {"load": load, "cores": 2}} for load in (0.1, 5.0)]
    assert "busy" not in study.speed({"cells": cells[:1]}) and "| 1.25 |" in study.speed({"cells": cells})
    assert "1 of these 2 cells began on a busy machine" in study.speed({"cells": cells})
    assert "Not measured" in study.speed({"cells": []})
    check = {"label": "b, k 2", "predicted": 110.0, "measured": 100.0, "error": 0.1}
    load = {"trace": "a, greedy, p 1", "batch_size": 1, "verdict": "speculate: b", "verified": [check]}
    assert "| 110.0 | 100.0 | +10% |" in study.predictions({"predictions": [load]})
