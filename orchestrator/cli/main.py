"""The command line, `paceline`: the names of all commands, each imported when it is called.

Results go to stdout, the rest to stderr. Shared options are in `paceline.cli.options`, what is shown, and progress, in
`paceline.cli.console`.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

import paceline


def _all_in(module: str, summaries: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (module, summary) for name, summary in summaries.items()}


COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("decode", "Generate text, without or with a drafter (`paceline list` shows them)."),
    "chat": ("decode", "Talk to a chat model: each line is a question, /help lists the commands."),
    "compile": (
        "neuron",
        "Compile all graphs of a model and its draft before their first use, on a backend that compiles (neuron).",
    ),
    "bench": (
        "decode",
        "Measure plain decoding, n-grams, a drafter at every length, and `generate` of transformers in one run.",
    ),
    "plan": (
        "serve",
        "Assign the models of a file to the cores of an instance. Starts nothing. Exit status 2 if there is no plan.",
    ),
    "plan-speed": (
        "experiment",
        "Find the fastest mode, draft length and cores at each load and how certain that is; or not to speculate.",
    ),
    "cost": (
        "neuron",
        "Estimate the time of a speculative round, or of a plain step, on Neuron chips, without weights or a chip.",
    ),
    "export-hlo": (
        "neuron",
        "Write the graphs of a pair, without weights, and a script that compiles them on any machine.",
    ),
    "serve": (
        "serve",
        "Serve models over OpenAI's API: chat, completions, responses; a page at /, and /metrics. Stop it with Ctrl-C.",
    ),
    "fetch": ("catalog", "Fetch a published model and print its folder."),
    "list": (
        "catalog",
        "List drafters and acceptance rules with their options, model families, layouts of weights, and backends.",
    ),
    "doctor": (
        "checks",
        "Check this machine: compilers, cache, Neuron chips and SDK. Exit code 1 if something is broken.",
    ),
    "selftest": (
        "checks",
        "Run a tiny random model on a backend and compare every token with plain PyTorch. Exit code 1 if one differs.",
    ),
    "verify": (
        "checks",
        (
            "Test that a target with your draft generates the tokens of plain decoding, on your models. Exit code 1 "
            "on a failure."
        ),
    ),
    "medusa-tree": (
        "train",
        "Build the best tree of a given size for the accuracy of heads, measured on the target's own greedy output.",
    ),
    "convert-medusa": (
        "train",
        "Convert Medusa heads to another layout: Paceline's, that of Medusa's own code, or that of NxD Inference.",
    ),
    "convert-eagle": (
        "train",
        "Convert an EAGLE head to another layout: Paceline's, the EAGLE repository's, NxD Inference's or speculators'.",
    ),
}
"""Of every command the module that has it, and the first paragraph of its help."""

TRAIN = _all_in(
    "train",
    {
        "medusa": ("Train Medusa heads on a frozen target, and print how often each head is right."),
        "dflash": (
            "Train a DFlash head on a frozen target, and print its acceptance: blocks with 1, 2, ... right drafts."
        ),
        "pard": (
            "Train a PARD decoder on a frozen target, and print its acceptance: blocks with 1, 2, ... right drafts."
        ),
        "eagle": (
            "Train an EAGLE head on a frozen target, and print its acceptance: greedy chains of 1, 2, ... right drafts."
        ),
    },
)

EXPERIMENT = _all_in(
    "experiment",
    {
        "run": "Run the unfinished cells, and write results.jsonl, results.parquet, report.md, report.html and traces.",
        "whatif": ("Simulate other drafters, depths, trees or batch sizes on recorded sequences, without a model."),
        "regret": "Show how many rounds a choice among drafters loses against the best fixed one, on recorded "
        "sequences.",
        "compare": "Compare the cells that two runs share, prompt by prompt, with a paired test.",
        "import": (
            "Show the acceptance that other engines recorded, by the definitions of this program; a line for "
            "every file."
        ),
        "report": "Make report.md and report.html of a folder again.",
        "export": "Write results as other tools read them: Spec-Bench's answers, AIPerf's records, vLLM's metrics.",
    },
)

MODELS = _all_in(
    "serve",
    {
        "list": "All models of the service, and whether they are in memory.",
        "load": (
            "Load a model; idle models that are not pinned leave where it needs their room. Ends when it can answer."
        ),
        "unload": "Unload a model, after the requests that it has.",
        "pin": "Keep a model in memory.",
        "unpin": "Let a model leave again.",
    },
)

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


class Commands(TyperGroup):
    """Commands that are imported when they are called. What stands for one until then gives its module.

    Where results cannot be written (`> /dev/full`): one line, and exit status 1. Pipes nobody reads are typer's.
    """

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


def _group(text: str, commands: Mapping[str, tuple[str, str]]) -> typer.Typer:
    group = typer.Typer(cls=Commands, help=text, no_args_is_help=True, pretty_exceptions_enable=False)
    for name, (module, summary) in commands.items():
        group.command(name, help=summary, rich_help_panel=PANELS.get(name) if commands is COMMANDS else None)(
            _module(module)
        )
    return group


app = _group("Speculative decoding on CPUs and AWS Neuron: drafts are proposed, the target verifies them.", COMMANDS)
for _name, _text, _rows in (
    ("train", "Train heads for a target.", TRAIN),
    ("experiment", "Measure acceptance and speed over a grid, and answer what-if questions.", EXPERIMENT),
    ("models", "Models of a running service: list, load, unload, pin.", MODELS),
):
    app.add_typer(_group(_text, _rows), name=_name, rich_help_panel=PANELS[_name])


atexit.register(gc.freeze)  # all memory goes with the process: Python need not look for circles in PyTorch's modules


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(paceline.__version__)
        raise typer.Exit
