"""`paceline experiment whatif`, `compare`, `report` and `export`: questions to finished results and traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import console, progress
from paceline.cli.config_options import command
from paceline.cli.options import AsJson
from paceline.core.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.experiments.whatif import Policy

app = typer.Typer()

ResultFolder = Annotated[Path, typer.Argument(help="The --out folder of `paceline experiment run`.")]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What is asked about."""

    drafter: Annotated[
        tuple[str, ...],
        typer.Option(help="Recorded, or a text drafter (ngram, suffix:min_match=3); a list a+b; or choice:a+b."),
    ] = ()
    k: Annotated[
        str | None,
        typer.Option(help="Depths: 4, 1,2,4 or 1:8; or a ladder [0,2,4], with --times. Default: as recorded."),
    ] = None
    confidence: Annotated[
        str | None, typer.Option(help="Thresholds of confidence of draft models: 0.2,0.4. Default: their own.")
    ] = None
    tree: Annotated[str | None, typer.Option(help="Nodes of a recorded static tree to keep, such as 0,1,3.")] = None


def _policies(asked: PolicyOptions, recorded: tuple[str, ...]) -> Iterator[Policy]:
    """Every drafter, depth and threshold that is asked about; without a drafter, all that were recorded."""
    from paceline.experiments.whatif import Policy, parse_depths, parse_thresholds

    k = asked.k
    ladder = () if k is None or not k.startswith("[") else tuple(sorted(parse_depths(k.strip("[]"))))
    depths = [None] if k is None or ladder else list(parse_depths(k))
    nodes = None if asked.tree is None else parse_depths(asked.tree, "--tree")
    thresholds = [None] if asked.confidence is None else list(parse_thresholds(asked.confidence))
    for name, depth, threshold in product(asked.drafter or recorded or ("suffix",), depths, thresholds):
        yield replace(Policy.parse(name, depth, nodes, recorded=recorded), ladder=ladder, confidence=threshold)


@command(app, "whatif")
def whatif(
    trace: Annotated[Path, typer.Argument(help="A file below traces/ of an experiment.")],
    asked: PolicyOptions,
    *,
    batch_size: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = 1,
    times: Annotated[Path | None, typer.Option(help="round_times.json of an experiment, to predict speed.")] = None,
    target: Annotated[Path | None, typer.Option(help="Refuse the trace unless it is of this model.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what other drafters, depths, trees or batch sizes would have done on recorded texts, without a model."""
    with console.refusals():
        from paceline.experiments import whatif as questions
        from paceline.experiments.config import fingerprint
        from paceline.experiments.round_times import load_times
        from paceline.experiments.trace import check_target, load_trace

        loaded = load_trace(trace)
        recorded = tuple(one.name for one in loaded.drafters)
        if target is not None:
            check_target(loaded, fingerprint(str(target)), str(target))
        if batch_size < 1:
            raise ConfigurationError(f"--batch-size must be at least 1, not {batch_size}")
        measured = None if times is None else load_times(times).of(loaded)
        answers: list[dict[str, Any]] = []
        refused: list[tuple[str, ConfigurationError]] = []
        for policy in _policies(asked, recorded):
            try:
                answers.append(questions.ask(loaded, policy, batch_size=batch_size, times=measured).to_dict())
            except ConfigurationError as error:
                refused.append((policy.label, error))
        if refused and (asked.drafter or not answers):
            raise refused[0][1]
    for label, reason in refused:  # nobody asked for these by name
        console.say(console.err(), f"left out: {label}: {reason}", style="yellow")
    if as_json:
        typer.echo(json.dumps(answers))
        return
    table = Table("policy", "mean acceptance length", "tokens per round", "accepted of drafted", "tokens/s")
    for row in answers:
        speed = row["tokens_per_second"]
        cells = [f"{row[name]:.3f}" for name in ("mean_acceptance_length", "tokens_per_round", "draft_acceptance_rate")]
        table.add_row(Text(str(row["policy"])), *cells, "-" if speed is None else f"{speed:.1f}")
    console.out().print(table)


@app.command()
def regret(
    trace: Annotated[Path, typer.Argument(help="A file below traces/ of an experiment.")],
    *,
    drafter: Annotated[
        list[str] | None, typer.Option(help="To choose among. Default: all that draft chains, ngram and suffix.")
    ] = None,
    k: Annotated[int, typer.Option(help="Drafted tokens a round.", min=1)] = 4,
    as_json: AsJson = False,
) -> None:
    """Say what a choice among drafters loses against the best fixed one, in rounds, on recorded texts."""
    with console.refusals():
        from paceline.experiments.trace import load_trace
        from paceline.experiments.whatif import regret as asked

        found = asked(load_trace(trace), drafter or (), k=k)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    table = Table("drafter", "rounds", "best for so many texts", "the choice against it")
    rows = [(name, one.acceptance.num_rounds, found.best_of.count(name)) for name, one in found.fixed.items()]
    for name, rounds, texts in [*rows, ("the best for every text", found.perfect.num_rounds, len(found.best_of))]:
        table.add_row(Text(name), str(rounds), str(texts), f"{found.against(rounds):+.1%}")
    console.out().print(table)
    typer.echo(f"the choice: {found.choice.acceptance.num_rounds} rounds; best fixed drafter: {found.best}")


@app.command()
def tune(
    folder: ResultFolder,
    trace: Annotated[Path, typer.Argument(help="A file below its traces/.")],
    *,
    out: Annotated[Path, typer.Option(help="Models file to write, for `paceline serve`.")],
    batch_size: Annotated[int, typer.Option(help="Requests decoded at the same time.")] = 1,
    max_depth: Annotated[int, typer.Option(help="Deepest draft to try.")] = 8,
    trials: Annotated[int, typer.Option(help="Thresholds of confidence to try; 0: none.", min=0)] = 30,
    check: Annotated[bool, typer.Option(help="Run the best beside plain decoding.")] = True,
    as_json: AsJson = False,
) -> None:
    """Find the fastest drafter, depth and threshold for the prompts of a trace, run it, and write a models file.

    A run that fails ends it before anything is written.
    """
    with console.refusals():
        from paceline.decoder.weights.atomic_write import save_bytes
        from paceline.experiments import round_times, runner, store, tune
        from paceline.experiments.trace import load_trace

        if batch_size < 1:
            raise ConfigurationError(f"--batch-size must be at least 1, not {batch_size}")
        config, loaded = store.read_config(folder), load_trace(trace)
        times = round_times.load_times(folder / "round_times.json").of(loaded)
        answers = tune.search(loaded, times, batch_size=batch_size, max_depth=max_depth)
        answers = tune.search_thresholds(loaded, times, answers, batch_size=batch_size, trials=trials)
        best, run = answers[0], None
        own = tune.verifying(config, loaded, best.policy, batch_size=batch_size)
        planned = runner.plan(own, None)
        cell = planned.cells[0].cell
        if check:
            with progress.bar(console.err(), "verify", len(planned.cells)) as shown:
                results = runner.run(planned, store.Store(folder / "verify"), lambda text, *_: shown.step(text))
            run = tune.checked(loaded, times, best.policy, result=results[0])
        save_bytes(out, [tune.models_file(config, best.policy, cell).encode()])
    answers_json = [answer.to_dict() for answer in answers]
    if as_json:
        found = {"best": answers_json[0], "run": None if run is None else run.to_dict(), "all": answers_json}
        typer.echo(json.dumps(found))
        return
    for row in answers_json[:10]:
        speed, length = row["tokens_per_second"], row["mean_acceptance_length"]
        typer.echo(f"{speed:8.1f} tokens/s predicted, length {length:.2f}: {row['policy']}")
    if run is not None:
        typer.echo(f"run: {run.predicted:.1f} tokens/s predicted, {run.measured:.1f} measured, plain {run.plain:.1f}")
    if run is not None and run.speedup < 1:
        said = f"warning: the run was {run.speedup:.2f} times as fast as plain decoding beside it. Run it again on a "
        console.say(console.err(), said + "quiet machine, and serve without a draft if it stays so", style="yellow")
    typer.echo(f"written: {out}")


@app.command()
def compare(
    first: ResultFolder,
    second: ResultFolder,
    *,
    figure: Annotated[
        str, typer.Option(help="tokens_per_second, mean_acceptance_length, draft_acceptance_rate or seconds.")
    ] = "mean_acceptance_length",
    as_json: AsJson = False,
) -> None:
    """Compare the cells that two runs share, prompt by prompt, with a paired test."""
    with console.refusals():
        from paceline.experiments.statistics import compare_rows
        from paceline.experiments.store import read_results

        figures = ("tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate", "seconds")
        if figure not in figures:
            raise ConfigurationError(f"--figure {figure!r} is unknown; use one of {', '.join(figures)}")
        ours, theirs = (
            {json.dumps(dict(one.names), sort_keys=True): one for one in read_results(folder) if one.error is None}
            for folder in (first, second)
        )
        shared = [name for name in ours if name in theirs]
        if not shared:
            raise ConfigurationError("the two runs share no cell: none has the same names (target, drafter, k, ...)")
        rows = [(ours[name].names, compare_rows(ours[name].rows, theirs[name].rows, figure)) for name in shared]
    if as_json:
        comparisons = [
            {
                **names,
                "figure": figure,
                "prompts": one.prompts,
                "units": one.units,
                "first": one.first,
                "second": one.second,
                "difference": one.difference.value,
                "low": one.difference.low,
                "high": one.difference.high,
                "p_value": one.p_value,
            }
            for names, one in rows
        ]
        typer.echo(json.dumps(comparisons))
        return
    table = Table("drafter", "k", "sampling", "batch", "prompts", "first", "second", "difference", "p")
    for names, one in rows:
        where = [Text(str(names[name])) for name in ("drafter", "k", "sampling", "batch_size")]
        values = [str(one.prompts), f"{one.first:.3f}", f"{one.second:.3f}", str(one.difference), f"{one.p_value:.4f}"]
        table.add_row(*where, *(Text(value) for value in values))
    console.out().print(table)
    if alone := len(ours) + len(theirs) - 2 * len(shared):
        console.say(console.err(), f"{alone} cells are in one of the runs alone, and are left out", style="yellow")


@app.command("import")
def import_records(
    files: Annotated[list[Path], typer.Argument(help="JSON lines: vLLM's responses or AIPerf's records.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show the acceptance that other engines recorded, by the definitions of this program; a line for every file.

    Records need the arrays of every step (vLLM: --per-request-spec-decode-metrics detailed).
    """
    with console.refusals():
        from paceline.experiments.definitions import Acceptance
        from paceline.experiments.exchange import read_records

        found = [(file, [one for _, one in read_records(file)]) for file in files]
    rows = [{"file": str(file), "requests": len(ones), **Acceptance.pooled(ones).to_dict()} for file, ones in found]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    shown = ("mean_acceptance_length", "tokens_per_round", "draft_acceptance_rate", "conditional_acceptance_rate")
    table = Table("file", "requests", *(name.replace("_", " ") for name in shown), "acceptance by position")
    for row in rows:
        figures = [f"{row[name]:.3f}" for name in shown]
        places = "  ".join(f"{place:.0%}" for place in row["acceptance_by_position"])
        table.add_row(Text(row["file"]), str(row["requests"]), *figures, places)
    console.out().print(table)


@app.command()
def report(folder: ResultFolder) -> None:
    """Make report.md and report.html of a folder again."""
    with console.refusals():
        from paceline.experiments.report import write_reports
        from paceline.experiments.store import Store, read_results

        for path in write_reports(Store(folder), folder.name, read_results(folder)):
            typer.echo(str(path))


@app.command()
def export(
    folder: ResultFolder,
    layout: Annotated[str, typer.Argument(help="spec-bench, aiperf or vllm.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder for one file of every cell.")],
) -> None:
    """Write results as other tools read them: Spec-Bench's answers, AIPerf's records, vLLM's metrics."""
    with console.refusals():
        from paceline.experiments.exchange import write_exports

        for path in write_exports(out, folder, layout):
            typer.echo(str(path))
