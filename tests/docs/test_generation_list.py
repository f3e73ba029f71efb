"""The page's list of transformers' generation tests names tests that are here."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT, text


def test_the_tests_that_stand_for_those_of_transformers_exist() -> None:
    table = text("docs/huggingface.md").split("| there (`test_...`) | here |")[1]
    named = {name for row in table.splitlines() for name in re.findall(r"`(test_\w+)`", row)}
    written = {
        name
        for file in (ROOT / "tests" / "huggingface").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 8 and named <= written
