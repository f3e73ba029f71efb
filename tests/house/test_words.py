"""scripts/words.py, which `make check` runs over the pages: each pattern finds a sentence that it is for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.docs.pages import ROOT

FOUND = {
    "D1": "| `k` | What the option sets |",
    "D2": "| `k` | Of the running process |",
    "D3": "- See `paceline.core`.",
    "D4": "| `k` | It worked |",
    "D5": "A failure is told at once.",
    "D6": "Tokens behind the last one are dropped.",
    "D7": "The graph runs so many rounds.",
    "D8": "This is no draft length.",
    "D9": "Tokens are counted there.",
    "D10": "Every call begins anew.",
    "P1": "It has a file that names a model which is read where it is stored.",
    "P2": "The rates are 0.4, 0.5, 0.6 and 0.7 with 1 or 2 drafts.",
    "P4": "The head borrows the output layer and goes on.",
    "P3": "Of several turns the first is asked.",
    "E1": "The file says otherwise.",
    "E2": "- error: k must be 1 or more",
    "H1": "| `--k` | Of all texts |",
}
CODE = {  # each place of code that is looked at; `FOUND` has each pattern
    "D1": 'def f() -> None:\n    """What the option sets."""',
    "D2": 'class A:\n    """Of the running process."""',
    "D5": '"""A module that nobody reads."""',
    "P4": '"""Rows that are filled up with zeros."""',
    "E1": 'raise ConfigurationError(f"k={k} says otherwise; give 1")',
    "E2": 'raise ConfigurationError(f"k must be at least 1, not {k!r} or so")',
    "H1": 'typer.Option(help="Of all texts.")',
}
KEPT_CODE = '''"""Model of the test, that is no longer needed."""
option = typer.Option(help="Seed of sampling.")
raise ConfigurationError(f"k: expected at least 1, got {k}; raise it")
raise PlanError(f"{where}: {error}") from error
'''
KEPT = """# What runs

Users with write access can run code. There is no plan behind a proxy, or the rest is no longer needed.
Llama-3-8B and Qwen 2 with EAGLE-3 took 1.5 s on 2026-11-28, and 2 s before.

| option | meaning |
|---|---|
| `k` | drafted tokens per round; error: k must be 1 or more; give 1 |

    | code | What the option sets |
"""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import words

        yield words
    sys.modules.pop("words", None)


def test_every_fault_is_found_in_pages_and_plain_text_passes(script: ModuleType) -> None:
    assert {kind.name for kind in script.KINDS} == FOUND.keys()
    for name, text in FOUND.items():
        assert name in {kind.name for kind, _ in script.faults(text)}, name
    assert list(script.faults(KEPT)) == []
    assert script.words("| a | 1.5 |\n") == 5


def test_a_page_without_a_budget_or_over_it_is_named(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["words.py"])
    monkeypatch.setitem(script.BUDGETS, "README.md", 10)
    monkeypatch.delitem(script.BUDGETS, "docs/scale.md")
    assert script.main() == 1
    said = capsys.readouterr().out
    assert "README.md: " in said and "budget 10" in said and "docs/scale.md: " in said


def test_every_fault_is_found_in_code_and_plain_code_passes(script: ModuleType) -> None:
    for name, source in CODE.items():
        assert name in {kind.name for kind, _, _ in script.code_faults(source)}, name
    assert list(script.code_faults(KEPT_CODE)) == []
