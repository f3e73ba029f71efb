"""`paceline doctor` and `paceline selftest`: options and printing; what they do is in modules of these names."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.options import AsJson
from paceline.diagnostics import doctor

SIGNS = {"good": "ok  ", "note": "note", "bad": "BAD "}


app = typer.Typer()


@app.command(name="doctor")
def show_doctor(as_json: AsJson = False) -> None:
    """Look at this machine: compilers, cache, Neuron chips and SDK. Exit code 1 if something here is broken."""
    lines = doctor.examine()
    if as_json:
        typer.echo(json.dumps({"healthy": doctor.healthy(lines), "lines": [asdict(line) for line in lines]}))
    else:
        for line in lines:
            typer.echo(f"{SIGNS[line.level]} {line.subject}: {line.text}")
    if not doctor.healthy(lines):
        raise typer.Exit(1)


@app.command(name="selftest")
def show_selftest(
    backend: Annotated[str, typer.Option(help="neuron, xla, inductor or eager.")] = "inductor",
) -> None:
    """Run a tiny random model on a backend and compare every token with plain PyTorch. Exit code 1 if one differs."""
    from paceline.diagnostics import selftest  # loads much that the other commands do not need

    with console.refusals():
        selftest.known(backend)
        checks = []
        for check in selftest.run(backend):
            checks.append(check)
            console.say(console.err(), f"{check.name}: {'ok' if check.passed else 'FAILED'}")
    typer.echo(selftest.report(backend, checks))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
