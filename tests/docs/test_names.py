"""Names in pages exist: modules and classes, files, commands and their options, targets of the Makefile, links. And
parts of pages that are written from the code name everything that it declares.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from paceline.core import errors
from paceline.neuron_config import key_tables
from tests.cli.calling import call
from tests.docs.pages import CURRENT, PAGES, ROOT, anchors, commands, prose, python, text


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[split:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("page", CURRENT)
def test_names_of_the_package_exist(page: str) -> None:
    names = set(re.findall(r"`(paceline(?:\.\w+)+)", prose(page)))
    for block in python(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert {name for name in names if not exists(name)} == set()


@pytest.mark.parametrize("page", CURRENT)
def test_files_exist(page: str) -> None:
    named = re.findall(
        r"`((?:core|decoder|neuron|draft|target|heads|medusa|eagle|placement|orchestrator|tests|benchmarks|scripts|docs|examples)"
        r"/[\w./-]*)`",
        prose(page),
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", CURRENT)
def test_commands_and_options_exist(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # help cuts long options where a line is short
    missing = []
    for name, options in commands(page):
        known = call(*name.split(), "--help")
        missing += [name] if known.exit_code else [f"{name} {one}" for one in options if one not in known.stdout]
    assert missing == []


LINK = r"\]\(([^)\s]+)\)"


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    broken = []
    for link in re.findall(LINK, prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        place = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not place.exists() or (anchor and anchor not in anchors(place.relative_to(ROOT).as_posix())):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    listed = {link.partition("#")[0] for link in re.findall(LINK, prose("docs/index.md"))}
    pages = {page.removeprefix("docs/") for page in PAGES if re.fullmatch(r"docs/(extending/)?[^/]+\.md", page)}
    assert pages - listed == {"index.md"}


@pytest.mark.parametrize("page", CURRENT)
def test_targets_of_make_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^    make ([\w-]+)", text(page), re.MULTILINE) + re.findall(r"`make ([\w-]+)", prose(page))
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


# ---- parts that are written from the code


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
