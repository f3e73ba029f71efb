"""`paceline doctor` and `paceline selftest`: options and printing; what they do is in modules of these names."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.options import AsJson
from paceline.core.errors import ConfigurationError

SIGNS = {"good": "ok  ", "note": "note", "bad": "BAD "}


app = typer.Typer()


@app.command(name="doctor")
def show_doctor(as_json: AsJson = False) -> None:
    """Look at this machine: compilers, cache, Neuron chips and SDK. Exit code 1 if something here is broken."""
    from paceline.diagnostics import doctor

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
    backend: Annotated[
        str | None,
        typer.Option(help="neuron, xla, native (the default) or eager. With --batch-invariance: this one alone."),
    ] = None,
    *,
    batch_invariance: Annotated[
        bool,
        typer.Option("--batch-invariance", help="Compare the bits of rows decoded together with those of each alone."),
    ] = False,
    target: Annotated[
        Path | None, typer.Option(help="With --batch-invariance: folder of a model, in place of a tiny random one.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="With --batch-invariance: most rows together. Default: 17.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a tiny random model on a backend and compare every token with plain PyTorch. Exit code 1 if one differs.

    With --batch-invariance: on every backend that works here, how many logits differ in any bit from those of a row
    that is decoded alone. Exit code 1 if one does on a backend that promises none.
    """
    with console.refusals():
        if batch_invariance:
            passed, text = _measure_bits(backend, target, rows=rows, as_json=as_json)
        else:
            for name, value in (("--target", target), ("--rows", rows)):
                if value is not None:
                    raise ConfigurationError(f"{name} is for --batch-invariance alone; add that, or leave it out")
            passed, text = _check_tokens(backend or "native", as_json=as_json)
    typer.echo(text)
    if not passed:
        raise typer.Exit(1)


def _check_tokens(backend: str, *, as_json: bool) -> tuple[bool, str]:
    from paceline.diagnostics import selftest  # loads much that the other commands do not need

    selftest.known(backend)
    checks = []
    for check in selftest.run(backend):
        checks.append(check)
        console.say(console.err(), f"{check.name}: {'ok' if check.passed else 'FAILED'}")
    passed = all(check.passed for check in checks)
    if as_json:
        values = {"backend": backend, "passed": passed, "checks": [asdict(check) for check in checks]}
        return passed, json.dumps(values)
    return passed, selftest.report(backend, checks)


def _measure_bits(backend: str | None, target: Path | None, *, rows: int | None, as_json: bool) -> tuple[bool, str]:
    from paceline.diagnostics import batch_invariance

    most = batch_invariance.MOST if rows is None else rows
    batch_invariance.check(target, most)
    backends, missing = batch_invariance.available(backend)
    series = []
    for one in batch_invariance.run(backends, target, most=most, say=partial(console.say, console.err())):
        series.append(one)
        console.say(console.err(), f"{one.backend}, {one.amp}: {'ok' if one.passed else 'FAILED'}")
    passed = all(one.passed for one in series)
    if as_json:
        values = {"passed": passed, "missing": missing, "series": [asdict(one) for one in series]}
        return passed, json.dumps(values)
    return passed, batch_invariance.report(series, missing)
