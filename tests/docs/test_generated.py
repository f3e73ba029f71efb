"""Parts of pages that are written from the code name everything that the code declares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from paceline.core import errors
from paceline.neuron_config import key_tables
from tests.docs.pages import CURRENT, ROOT, text


@pytest.fixture(scope="module")
def parts() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import docs_generated

        yield docs_generated
    sys.modules.pop("docs_generated", None)


def test_every_marker_has_a_part_and_every_part_a_page(parts: ModuleType) -> None:
    named = [name for page in CURRENT for name in re.findall(r"<!-- generated:(\w+) -->", text(page))]
    assert sorted(named) == sorted(parts.PARTS)


def test_every_neuron_config_key_is_listed_with_its_reason(parts: ModuleType) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in parts.neuron_config_keys().split("\n")]
    for name, reason in key_tables().without_effect.items():
        assert any(f"`{name}`" in row[0] and row[1:] == [reason] for row in rows), name
    for name, (values, reason) in key_tables().refused.items():
        assert [f"`{name}`", ", ".join(f"`{value!r}`" for value in values), reason] in rows, name


def test_generated_pages_have_options_and_error_meanings(parts: ModuleType) -> None:
    commands = parts.commands()
    for line in ("## `paceline generate`", "## `paceline train eagle`", "| `--target` | ", "| `--max-waiting` | "):
        assert line in commands
    assert not re.search(r"\| `--[^|]*\|  \|", commands), "an option without help"
    assert f"| `DeadlineError` | {(errors.DeadlineError.__doc__ or '').strip()} |" in parts.error_classes()
