"""A griffe extension for `make docs`: docstrings as Markdown.

Docstrings list fields in two columns (name, spaces, meaning), for readers of the source. Markdown would run the lines
together, so they become a list here. Brackets side by side, as in `[B, N][0]`, are no references.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROW = re.compile(r"^(?P<indent> *)(?P<name>[^\s].*?)(?: {2,}| - )(?P<meaning>\S.*)$")
NAME = re.compile(r"``?[^`]+``?|[\w*]+(?:(?:, | and | or |/)[\w*]+)*")


def markdown(text: str) -> str:
    """The docstring with its two-column rows as list items; everything else as it stands, code blocks too."""
    lines: list[str] = []
    hanging = -1  # column at which the meaning of the last row began: its next lines begin there too
    for line in text.split("\n"):
        row = ROW.match(line)
        column = len(line) - len(line.lstrip())
        if hanging >= 0 and line.strip() and column >= min(hanging, 4) and not (row and column < hanging):
            lines[-1] += " " + line.strip()
        elif row and column == 0 and NAME.fullmatch(row["name"]):
            if lines and lines[-1] and hanging < 0:
                lines.append("")
            hanging = row.start("meaning")
            lines.append(f"- `{row['name'].strip('`')}`: {row['meaning']}")
        else:
            if hanging >= 0 and line.strip():
                lines.append("")
            hanging = -1
            lines.append(line)
    return re.sub(r"\](?=\[)", r"]\\", "\n".join(lines))


class TwoColumns(griffe.Extension):
    """Turns every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
