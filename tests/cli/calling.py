"""Calling a command, and reading its JSON object."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from paceline.cli.console import Bar
from paceline.cli.main import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def last(done: Result) -> dict[str, object]:
    assert done.exit_code == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def refused(said: str, *arguments: object) -> None:
    """Call a command with what it cannot have: it says so."""
    done = call(*arguments)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split()) and "Traceback" not in done.stderr, done.output


def terminated(*arguments: object) -> Result:
    """Run a training that gets SIGTERM when its first step is reported."""
    reach = Bar.reach

    def told(bar: Bar, done: int, total: int, what: str = "") -> None:
        reach(bar, done, total, what)
        if what.startswith("training"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "reach", told)
        return call(*arguments)


def trained_in_three_goes(command: list[object], work: Path) -> dict[str, object]:
    """Stop a training by its time limit, then by SIGTERM, and let it end. -> what it prints"""
    stopped = call(*command, "--max-minutes", 0)
    assert stopped.exit_code == 75, stopped.stderr
    assert "again to resume" in stopped.stderr and not (work.parent / "model.safetensors").exists()
    ended = terminated(*command)
    assert ended.exit_code == 143 and "again to resume" in ended.stderr
    assert torch.load(work / "state.pt", weights_only=True)["state"]["step"] == 2
    done = call(*command)
    assert "training, loss" in done.stderr, "not on a terminal: lines"
    return last(done)
