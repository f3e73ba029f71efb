"""What a command does whose output cannot be written: in a process of its own, since Python writes at its end too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_results_that_cannot_be_written_are_one_line() -> None:
    command = [sys.executable, "-c", "from paceline.cli.main import app; app()", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr == "error: the output cannot be written (No space left on device)\n"
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode == 1
