"""Calling a command, and reading its JSON object."""

from __future__ import annotations

import json
import os
import signal

import pytest
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
