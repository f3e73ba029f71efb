"""The folders as the one package they are installed as, in links below build/typing.

Neither mypy nor griffe, which reads docstrings for the API pages, can follow setuptools' package-dir, and griffe
follows no link to a folder. scripts/check and `make docs` lay it out afresh.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = ROOT / "build" / "typing"


def lay_out() -> None:
    """Link every module of the parts, which are the top-level folders with an `__init__.py`, at its place."""
    shutil.rmtree(LAYOUT, ignore_errors=True)
    package = LAYOUT / "paceline"
    for part in (init.parent for init in ROOT.glob("*/__init__.py")):
        home = package if part.name == "orchestrator" else package / part.name
        for source in part.rglob("*.py"):
            link = home / source.relative_to(part)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)


if __name__ == "__main__":
    lay_out()
