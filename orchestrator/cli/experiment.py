"""`paceline experiment`: grids of targets, drafters, depths and prompts. The work is in `paceline.experiments`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import console, progress
from paceline.cli.options import AsJson

if TYPE_CHECKING:
    from paceline.experiments.runner import ExperimentPlan
    from paceline.experiments.store import Store

_GO_ON = 75
"""Exit status where time is over before all is done: EX_TEMPFAIL of sysexits.h, "try again"."""

app = typer.Typer()


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="YAML file of the experiment.")],
    *,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; finished cells in it are kept.")] = None,
    ray: Annotated[
        str | None, typer.Option(help="Cells at the same time on a Ray cluster: its address, auto, or local.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no cell after so many minutes; the same command goes on.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and an estimate of the time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is not finished, and write results.jsonl, results.parquet, report.md, report.html and traces.

    Exit status 1 if a cell failed, 75 if --minutes ended before all was done.
    """
    with console.refusals():
        from paceline.experiments import runner
        from paceline.experiments.config import load_config
        from paceline.experiments.store import Store

        config = load_config(file)
        if ray is not None:
            config = config.model_copy(update={"ray": ray})
        if out is None and not dry_run:
            raise typer.BadParameter("say where the results go", param_hint="--out")
        store = None if out is None or (dry_run and not out.exists()) else Store(out)
        planned = runner.plan(config, store)
        from paceline.experiments import record_traces, report, round_times

        _show_warnings(planned, store)
        if dry_run or store is None:
            _show_plan(planned, planned.estimated_seconds(store), as_json=as_json)
            return
        with progress.bar(console.err(), config.name, len(planned.cells)) as shown:

            def reached(label: str, done: int, total: int) -> None:
                shown.step(label)
                shown.reach(done, total)

            deadline = math.inf if minutes is None else monotonic() + 60 * minutes
            results = runner.run(planned, store, reached, deadline=deadline)
            if config.runs:
                report.write_rows(store.folder, results)
                store.write("round_times.json", round_times.save_times(round_times.measured(config, results)))
                report.write_reports(store, config.name, results)
            traces = record_traces.record_traces(planned, store, reached, deadline=deadline) if config.traces else []
        summaries = [report.summary(result) for result in results]
        failed = runner.failed(results)
        missing = (len(planned.cells) - len(results)) * config.runs, record_traces.count(planned) - len(traces)
    if as_json:
        typer.echo(json.dumps({"out": str(out), "failed": len(failed), "cells": summaries}))
    elif config.runs:
        _show_cells(summaries)
    if not as_json:
        for path in ([store.folder / "report.html"] if config.runs else []) + traces:
            console.say(console.err(), f"written: {path}")
    for result in failed:
        console.say(console.err(), f"failed: {_title(result.names)}: {result.error}", style="red")
    if failed:
        raise typer.Exit(1)
    if any(missing):
        cells, files = missing
        console.say(console.err(), f"{cells} cells and {files} traces are left; the same command goes on with them")
        raise typer.Exit(_GO_ON)


def _show_warnings(planned: ExperimentPlan, store: Store | None) -> None:
    for line in planned.warnings:
        console.say(console.err(), f"warning: {line}", style="yellow")
    if store is not None and (others := planned.of_other_programs()):
        remedy = f"they are kept; to run all anew, name another folder or remove {store.cells}"
        console.say(console.err(), f"warning: {others}; {remedy}", style="yellow")


def _show_plan(planned: ExperimentPlan, seconds: float, *, as_json: bool) -> None:
    rows = [{**one.cell.names(), "prompts": len(one.prompts.rows), "finished": one.finished} for one in planned.cells]
    if as_json:
        typer.echo(json.dumps({"cells": rows, "estimated_seconds": round(seconds)}))
        return
    for one in planned.cells:
        state = "finished" if one.finished else "to run"
        typer.echo(f"{state:9} {one.cell.title()} ({len(one.prompts.rows)} prompts)")
    if not planned.config.runs:
        typer.echo("no cell is run (runs: false): their drafters are recorded along the target's texts")
        return
    left = sum(not one.finished for one in planned.cells)
    typer.echo(f"{left} of {len(planned.cells)} cells to run, roughly {_duration(seconds)} on a quiet machine")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _title(names: object) -> str:
    return ", ".join(f"{key} {value}" for key, value in dict(names).items() if key != "temperature")  # type: ignore[call-overload]


def _show_cells(summaries: list[dict[str, object]]) -> None:
    shown = ("target", "drafter", "k", "sampling", "acceptor", "batch_size", "prompt_set")
    figures = ("mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second", "speedup", "texts_unlike_plain")
    table = Table(*(name.replace("_", " ") for name in (*shown, *figures)))
    for row in summaries:
        cells = [row.get(name) for name in (*shown, *figures)]
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))
    console.out().print(table)
