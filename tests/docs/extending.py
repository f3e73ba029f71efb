"""Programs of docs/extending, as separate files; no tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import python, text


def written(page: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the page's program as a module that can be imported by name. -> the page's row of a registry."""
    program, row = python(page)
    (folder / f"{name}.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return row


def lines(page: str) -> tuple[int, int]:
    """(lines of the program that the page states, lines that are not blank)"""
    stated = re.search(r"complete file has\s+(\d+) lines", text(page))
    assert stated is not None
    return int(stated[1]), sum(bool(line.strip()) for line in python(page)[0].splitlines())
