"""Calling a command, and reading the JSON object it ends with."""

from __future__ import annotations

import json

from click.testing import Result
from typer.testing import CliRunner

from paceline.cli import app


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def last(done: Result) -> dict[str, object]:
    assert done.exit_code == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found
