"""Heads written by the speculators library, in a separate environment, and what its forward pass gives for them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")

needs_speculators = [
    pytest.mark.speculators,
    pytest.mark.skipif(not PYTHON, reason="speculators is not here; `make test-heads` installs it"),
]
"""Marks of a module of tests: ``pytestmark = needs_speculators``."""


def run_script(script: Path, *arguments: str | Path) -> None:
    """Run a script with the interpreter that has speculators; raises with its output where it fails."""
    command = [PYTHON, "-P", str(script), *map(str, arguments)]  # this folder has a module of that name
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, f"{script.name} failed:\n{result.stdout}\n{result.stderr}"
