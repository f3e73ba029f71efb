"""The documents as data: their pages, blocks of code, commands and anchors."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
HISTORY = ("CHANGELOG.md", "docs/log.md", "docs/decisions/", "examples/")
"""Pages that speak of earlier states, or of other things than the package: what they name need not exist."""

CURRENT = [page for page in PAGES if not page.startswith(HISTORY)]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """Without fenced and indented code."""
    return re.sub(
        r"^( {4}.*)$", "", re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE
    )


def python(page: str, *, marked: bool = False) -> list[str]:
    """Its blocks of Python; or only those that are marked to be run."""
    mark = r"<!-- run -->\n" if marked else ""
    return re.findall(rf"^{mark}```python\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """(command with its subcommand, options) of every indented `paceline` line."""
    found = re.findall(r"^    (?:\w+=\S+ )*paceline ((?:.*\\\n)*.*)$", text(page), re.MULTILINE)
    split = []
    for line in found:
        words = re.sub(r"#.*| \| .*", "", line).split()
        name = " ".join(words[:2]) if words[0] in ("train", "experiment") else words[0]
        split.append((name, re.findall(r"(?<!\S)--[a-z][a-z-]*", re.sub(r'"[^"]*"', "", line))))
    return split


def anchors(page: str) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", head) for head in heads)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in plain}


def script(path: Path, name: str) -> ModuleType:
    """A file as a module of that name, in which its dataclasses find their types."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
