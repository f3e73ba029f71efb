"""The command line, `paceline`: the names of all commands, each imported when it is called.

Results go to stdout, the rest to stderr. Shared options are in `paceline.cli.options`, what is shown, and progress, in
`paceline.cli.console`.
"""

from __future__ import annotations

import ast
import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

import paceline

COMMANDS = {
    "generate": "decode",
    "chat": "decode",
    "compile": "neuron",
    "bench": "decode",
    "plan": "serve",
    "plan-speed": "experiment",
    "cost": "neuron",
    "export-hlo": "neuron",
    "serve": "serve",
    "fetch": "catalog",
    "list": "catalog",
    "doctor": "checks",
    "selftest": "checks",
    "verify": "checks",
    "medusa-tree": "train",
    "convert-medusa": "train",
    "convert-eagle": "train",
}
"""Module of each command."""

GROUPS = {
    "train": dict.fromkeys(("medusa", "dflash", "pard", "eagle"), "train"),
    "experiment": dict.fromkeys(("run", "whatif", "regret", "compare", "report", "export"), "experiment"),
    "models": dict.fromkeys(("list", "load", "unload", "pin", "unpin"), "serve"),
}
"""The same of the commands in groups."""

PANELS: dict[str, str] = {
    name: panel
    for panel, names in {
        "Run": ("generate", "chat", "compile", "fetch", "list"),
        "Serve": ("serve", "models"),
        "Measure": ("bench", "experiment"),
        "Train": ("train", "medusa-tree", "convert-medusa", "convert-eagle"),
        "Plan": ("plan", "plan-speed", "cost", "export-hlo"),
        "Diagnose": ("doctor", "selftest", "verify"),
    }.items()
    for name in names
}
"""Of a command or group the panel of `paceline --help` that shows it."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Why nothing more can be written. In files that is a `StorageError`, so what is left are the standard streams."""


@cache
def _summaries(module: str) -> dict[str, str]:
    """First paragraph of the help of each command of a module, which is not imported."""
    found = {}
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    for node in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
        for mark in (one for one in node.decorator_list if isinstance(one, ast.Call)):
            given = [*mark.args, *(one.value for one in mark.keywords if one.arg == "name")]
            name = next((str(one.value) for one in given if isinstance(one, ast.Constant)), node.name)
            found[name] = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return found


class Commands(TyperGroup):
    """Commands that are imported when they are called. What stands for one until then gives its module.

    Where results cannot be written (`> /dev/full`): one line, and exit status 1. Pipes nobody reads are typer's.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        for name, module in GROUPS.get(self.name or "", COMMANDS).items():
            self.commands[name].help = _summaries(module)[name]
        return super().list_commands(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None or isinstance(command, TyperGroup):
            return name, command, rest
        return name, get_group(command.callback().app).commands[name], rest  # type: ignore[misc]  # it has one

    def main(self, *args: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # in an ASCII locale a "?" is better than a traceback
                stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            with suppress(OSError):  # it may be the one that is full
                typer.echo(f"error: the output cannot be written ({error.strerror})", err=True)
            for stream in (sys.stdout, sys.stderr):
                _forget(stream)
            sys.exit(1)


def _forget(stream: Any) -> None:
    """Discard output that waits to be written, so that Python does not try again at exit and print an error."""
    with suppress(OSError, ValueError):  # it is no file
        hole = os.open(os.devnull, os.O_WRONLY)
        os.dup2(hole, stream.fileno())
        os.close(hole)


def _module(name: str) -> Callable[[], Any]:
    return lambda: import_module(f"paceline.cli.{name}")


def _group(text: str, commands: Mapping[str, str]) -> typer.Typer:
    group = typer.Typer(cls=Commands, help=text, no_args_is_help=True, pretty_exceptions_enable=False)
    for name, module in commands.items():
        group.command(name, rich_help_panel=PANELS.get(name) if commands is COMMANDS else None)(_module(module))
    return group


app = _group("Speculative decoding on CPUs and AWS Neuron: drafts are proposed, the target verifies them.", COMMANDS)
for _name, _text in (
    ("train", "Train heads for a target."),
    ("experiment", "Measure acceptance and speed over a grid, and answer what-if questions."),
    ("models", "Models of a running service: list, load, unload, pin."),
):
    app.add_typer(_group(_text, GROUPS[_name]), name=_name, rich_help_panel=PANELS[_name])


atexit.register(gc.freeze)  # all memory goes with the process: Python need not look for circles in PyTorch's modules


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(paceline.__version__)
        raise typer.Exit
