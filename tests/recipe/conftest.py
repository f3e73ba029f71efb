"""The recipe of the demo pair is not an installed package: its folder is put on the path, for one test at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "pycode"


@pytest.fixture(autouse=True)
def recipe_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    for name in [name for name in sys.modules if name.split(".")[0] == "recipe"]:
        monkeypatch.delitem(sys.modules, name)
