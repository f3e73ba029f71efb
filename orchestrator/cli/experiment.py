"""`paceline experiment` and `plan-speed`: grids of targets, drafters, depths and prompts, and questions to results.

The work is in `paceline.experiments`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import console
from paceline.cli.options import (
    BATCH_SIZE,
    AsJson,
    ConfigFile,
    FixedK,
    InstanceName,
    MaxDepth,
    MaxMinutes,
    OutFolder,
    TargetFormat,
    Trace,
    command,
    neuron_instance,
    numbers,
    shares,
)
from paceline.core.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.experiments.questions import LoadPlan, Policy
    from paceline.experiments.runner import ExperimentPlan
    from paceline.experiments.store import CellResult, Store
    from paceline.experiments.trace import Trace as LoadedTrace

app = typer.Typer()


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="YAML file of the experiment.")],
    *,
    out: OutFolder = None,
    ray: Annotated[str | None, typer.Option(help="Ray cluster for the cells: an address, auto or local.")] = None,
    minutes: MaxMinutes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the cells and an estimated time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the unfinished cells, and write results.jsonl, results.parquet, report.md, report.html and traces.

    Exit status 1 if a cell failed, 75 if --max-minutes ended before all was done.
    """
    with console.refusals():
        from paceline.experiments import runner
        from paceline.experiments.config import load_config
        from paceline.experiments.store import Store

        config = load_config(file)
        if ray is not None:
            config = config.model_copy(update={"ray": ray})
        if out is None and not dry_run:
            raise typer.BadParameter("expected a folder for the results; give --out DIR", param_hint="--out")
        store = None if out is None or (dry_run and not out.exists()) else Store(out)
        planned = runner.plan(config, store)
        from paceline.experiments import record_traces, report

        _show_warnings(planned, store)
        if dry_run or store is None:
            _show_plan(planned, planned.estimated_seconds(store), as_json=as_json)
            return
        results, traces = _run_all(planned, store, minutes)
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
        title = ", ".join(f"{key} {value}" for key, value in result.names.items() if key != "temperature")
        console.say(console.err(), f"failed: {title}: {result.error}", style="red")
    if failed:
        raise typer.Exit(1)
    if any(missing):
        cells, files = missing
        console.say(console.err(), f"{cells} cells and {files} traces are left; the same command goes on with them")
        raise typer.Exit(console.UNFINISHED)


def _run_all(planned: ExperimentPlan, store: Store, minutes: float | None) -> tuple[list[CellResult], list[Path]]:
    from paceline.experiments import record_traces, report, round_times, runner

    config = planned.config
    with console.bar(console.err(), config.name, len(planned.cells)) as shown:

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
    return results, traces


def _show_warnings(planned: ExperimentPlan, store: Store | None) -> None:
    for line in planned.warnings:
        console.say(console.err(), f"warning: {line}", style="yellow")
    if store is not None and (others := planned.of_other_programs()):
        remedy = f"they are kept; to run all again, name another folder or remove {store.cells}"
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
    roughly = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    typer.echo(f"{left} of {len(planned.cells)} cells to run, roughly {roughly} on a quiet machine")


def _show_cells(summaries: list[dict[str, object]]) -> None:
    shown = ("target", "drafter", "k", "sampling", "acceptor", "batch_size", "prompt_set")
    figures = ("mean_acceptance_length", "draft_acceptance_rate", "tokens_per_second", "speedup", "texts_unlike_plain")
    found = ([row.get(name) for name in (*shown, *figures)] for row in summaries)
    cells = (["-" if cell is None else cell for cell in row] for row in found)
    console.table(*(name.replace("_", " ") for name in (*shown, *figures)), rows=cells)


ResultFolder = Annotated[Path, typer.Argument(help="Folder that `paceline experiment run` wrote (its --out).")]


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Policy to simulate."""

    drafter: Annotated[
        tuple[str, ...],
        typer.Option(
            "--draft", "--drafter", help="Drafter: recorded, ngram, suffix:min_match=3, a list a+b, or choice:a+b."
        ),
    ] = ()
    k: Annotated[
        str | None,
        typer.Option(help="Draft depths: 4; 1,2,4; 1:8; with --times auto:0,2,4 to adapt. Default: as recorded."),
    ] = None
    compete: Annotated[
        bool, typer.Option("--compete", help="With auto: requests compete for a round's rows, as on the CPU.")
    ] = False
    confidence: Annotated[
        str | None, typer.Option(help="Confidence thresholds of draft models, such as 0.2,0.4. Default: as recorded.")
    ] = None
    tree: Annotated[str | None, typer.Option(help="Nodes of a recorded static tree to keep, such as 0,1,3.")] = None


def _policies(asked: PolicyOptions, recorded: tuple[str, ...]) -> Iterator[Policy]:
    """Every drafter, depth and threshold that is asked about; without a drafter, all that were recorded."""
    from paceline.experiments.questions import Policy

    k = asked.k
    adaptive = k is not None and k.startswith(("auto:", "["))
    draft_lengths = tuple(sorted(numbers(k.removeprefix("auto:").strip("[]"), "--k"))) if k and adaptive else ()
    if asked.compete and not draft_lengths:
        raise ConfigurationError(f"--compete: expected --k auto:0,2,4, whose rows it is for, got --k {k}; give that")
    depths = [None] if k is None or draft_lengths else list(numbers(k, "--k"))
    nodes = None if asked.tree is None else numbers(asked.tree, "--tree")
    thresholds = [None] if asked.confidence is None else list(shares(asked.confidence, "--confidence"))
    for name, depth, threshold in product(asked.drafter or recorded or ("suffix",), depths, thresholds):
        policy = Policy.parse(name, depth, nodes, recorded=recorded)
        yield replace(policy, draft_lengths=draft_lengths, confidence=threshold, competes=asked.compete)


@command(app, "whatif")
def whatif(
    trace: Trace,
    asked: PolicyOptions,
    *,
    batch_size: Annotated[int, typer.Option(min=1, help=BATCH_SIZE)] = 1,
    times: Annotated[Path | None, typer.Option(help="round_times.json of an experiment, to predict speed.")] = None,
    target: Annotated[Path | None, typer.Option(help="Model folder that the trace must belong to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate other drafters, depths, trees or batch sizes on recorded sequences, without a model."""
    with console.refusals():
        from paceline.experiments import questions
        from paceline.experiments.config import fingerprint
        from paceline.experiments.round_times import load_times
        from paceline.experiments.trace import check_target, load_trace

        loaded = load_trace(trace)
        recorded = tuple(one.name for one in loaded.drafters)
        if target is not None:
            check_target(loaded, fingerprint(str(target)), str(target))
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
    rows = []
    for row in answers:
        speed = row["tokens_per_second"]
        cells = [f"{row[name]:.3f}" for name in ("mean_acceptance_length", "tokens_per_round", "draft_acceptance_rate")]
        rows.append((row["policy"], *cells, "-" if speed is None else f"{speed:.1f}"))
    console.table("policy", "mean acceptance length", "tokens per round", "accepted of drafted", "tokens/s", rows=rows)


@app.command()
def regret(
    trace: Trace,
    *,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--draft", "--drafter", help="Drafter to choose among. Default: recorded ones of chains, ngram and suffix."
        ),
    ] = None,
    k: FixedK = 4,
    as_json: AsJson = False,
) -> None:
    """Show how many rounds a choice among drafters loses against the best fixed one, on recorded sequences."""
    with console.refusals():
        from paceline.experiments.questions import regret as asked
        from paceline.experiments.trace import load_trace

        found = asked(load_trace(trace), drafter or (), k=k)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    rows = [(name, one.acceptance.num_rounds, found.best_of.count(name)) for name, one in found.fixed.items()]
    rows.append(("the best for every text", found.perfect.num_rounds, len(found.best_of)))
    against = [(name, rounds, texts, f"{found.against(rounds):+.1%}") for name, rounds, texts in rows]
    console.table("drafter", "rounds", "best for so many texts", "the choice against it", rows=against)
    typer.echo(f"the choice: {found.choice.acceptance.num_rounds} rounds; best fixed drafter: {found.best}")


@app.command()
def compare(
    first: ResultFolder,
    second: ResultFolder,
    *,
    figure: Annotated[
        Literal["tokens_per_second", "mean_acceptance_length", "draft_acceptance_rate", "seconds"],
        typer.Option(help="Figure to compare."),
    ] = "mean_acceptance_length",
    as_json: AsJson = False,
) -> None:
    """Compare the cells that two runs share, prompt by prompt, with a paired test."""
    with console.refusals():
        from paceline.experiments.statistics import compare_rows
        from paceline.experiments.store import read_results

        ours, theirs = (
            {json.dumps(dict(one.names), sort_keys=True): one for one in read_results(folder) if one.error is None}
            for folder in (first, second)
        )
        shared = [name for name in ours if name in theirs]
        if not shared:
            raise ConfigurationError("the two runs have no cell in common; compare runs of the same configuration")
        rows = [(ours[name].names, compare_rows(ours[name].rows, theirs[name].rows, figure)) for name in shared]
    if as_json:
        typer.echo(json.dumps([{**names, **one.to_dict()} for names, one in rows]))
        return
    figures = [
        (one.prompts, f"{one.first:.3f}", f"{one.second:.3f}", one.difference, f"{one.p_value:.4f}") for _, one in rows
    ]
    where = [[names[name] for name in ("drafter", "k", "sampling", "batch_size")] for names, _ in rows]
    columns = ("drafter", "k", "sampling", "batch", "prompts", "first", "second", "difference", "p")
    console.table(*columns, rows=[(*a, *b) for a, b in zip(where, figures, strict=True)])
    if alone := len(ours) + len(theirs) - 2 * len(shared):
        console.say(console.err(), f"{alone} cells are in one of the runs alone, and are left out", style="yellow")


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
    layout: Annotated[str, typer.Argument(help="Format to write: spec-bench, aiperf or vllm.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder for one file per cell.")],
) -> None:
    """Write results as other tools read them: Spec-Bench's answers, AIPerf's records, vLLM's metrics."""
    with console.refusals():
        from paceline.experiments.exchange import write_exports

        for path in write_exports(out, folder, layout):
            typer.echo(str(path))


@dataclass(frozen=True, slots=True)
class MeasuredOptions:
    """Source of measured times and acceptance."""

    experiment: Annotated[
        Path | None, typer.Option(help="Folder of `paceline experiment run`, for its measured round times.")
    ] = None
    trace: Annotated[Path | None, typer.Option(help="Trace in its traces/ folder, for exact acceptance.")] = None
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare the best of each load with plain decoding. Needs --trace."),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(help="Models file of the fastest to write, for `paceline serve`. Needs --trace and one load."),
    ] = None
    time_error: Annotated[float, typer.Option(help="Relative error to assume for predicted times, from 0 to 1.")] = 0.1

    def check(self, sizes: Collection[int]) -> None:
        """Raise ConfigurationError for options that need others."""
        asked = {"--verify": self.verify, "--out": self.out is not None}
        if (name := next((one for one in asked if asked[one]), None)) and (not self.experiment or not self.trace):
            raise ConfigurationError(f"{name}: expected --experiment and --trace with it; give both")
        if self.out is not None and len(sizes) > 1:
            raise ConfigurationError(f"--batch-sizes: expected one with --out, got {len(sizes)}; give one of them")


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """A Neuron chip, by arithmetic."""

    target: Annotated[Path | None, ConfigFile] = None
    instance: InstanceName = None
    tp_degree: Annotated[
        tuple[str, ...] | None,
        typer.Option("--tp-degree", "--tp", help="Tensor-parallel degrees to try: 2,4; repeatable. Default: all."),
    ] = None
    acceptance_error: Annotated[float, typer.Option(help="Uncertainty of --acceptance (absolute).")] = 0.05
    quantization: TargetFormat = None


def _check_source(measured: MeasuredOptions, hardware: HardwareOptions) -> None:
    """Raise ConfigurationError unless times are either measured or those of a chip."""
    if (measured.experiment is None) == (hardware.target is None):
        got = "neither" if hardware.target is None else "both"
        raise ConfigurationError(
            "--experiment: expected --experiment for measured times, or --target and --draft for a Neuron chip, "
            f"got {got}; give one of them"
        )


@command(app, "plan-speed")
def plan_speed(
    measured: MeasuredOptions,
    hardware: HardwareOptions,
    *,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--drafter",
            help="Drafter that --acceptance is about: the name of a timed one, or with --target its config.json, or a "
            "folder with one. Default: none.",
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rate of a draft token, or by position: 0.8 or 0.8,0.7,0.6. Default: that of --trace."
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Numbers of requests decoded at the same time, such as 1,4.")] = "1",
    max_depth: MaxDepth = 8,
    as_json: AsJson = False,
) -> None:
    """Find the fastest mode, draft length and cores at each load and how certain that is; or not to speculate.

    From measured times (--experiment), or by arithmetic about a Neuron chip (--target, --draft, --instance). If a run
    of --verify fails, --out is not written.
    """
    with console.refusals():
        sizes, asked = numbers(batch_sizes, "--batch-sizes", least=1), Asked(draft, acceptance, max_depth)
        _check_source(measured, hardware)
        measured.check(sizes)
        checks: list[dict[str, Any]] = []
        if measured.experiment is None:
            plans = _hardware(hardware, asked, sizes=sizes)
        else:
            from paceline.experiments.trace import load_trace

            trace = None if measured.trace is None else load_trace(measured.trace)
            plans = _measured(measured, measured.experiment, asked, trace=trace, sizes=sizes)
            if trace is not None and measured.verify:
                checks = _verified(measured.experiment, trace, plans)
            if trace is not None and measured.out is not None:
                _save_models(measured.out, measured.experiment, trace, plan=plans[0])
    if as_json:
        source = "measured" if measured.experiment is not None else "arithmetic, not measured"
        typer.echo(json.dumps({"times": source, "loads": [one.to_dict() for one in plans], "verified": checks}))
        return
    for plan in plans:
        _show(plan)
    for check in checks:
        console.say(
            console.out(),
            f"batch {check['batch_size']}, {check['label']}: {check['predicted']:.1f} tokens/s predicted, "
            f"{check['measured']:.1f} measured ({check['error']:+.1%})",
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """A drafter whose acceptance is given, and the largest depth to try."""

    draft: str | None
    acceptance: str | None
    max_depth: int


def _measured(
    options: MeasuredOptions, folder: Path, asked: Asked, *, trace: LoadedTrace | None, sizes: Sequence[int]
) -> list[LoadPlan]:
    from paceline.experiments import questions
    from paceline.experiments.round_times import PLAIN, load_times

    timed = load_times(folder / "round_times.json")
    limits: dict[str, Any] = {"max_depth": asked.max_depth, "error": options.time_error}
    if (trace is None) == (asked.acceptance is None):
        got = "neither" if trace is None else "both"
        raise ConfigurationError(f"--acceptance: expected either --trace or --acceptance, got {got}; give one of them")
    if trace is not None:
        return [questions.from_trace(trace, timed.of(trace), batch_size=size, **limits) for size in sizes]
    times = timed.alone()
    if asked.draft is None:
        names = ", ".join(sorted({name for name, *_ in times.rounds} - {PLAIN}))
        raise ConfigurationError(f"--draft: expected one of {names} with --acceptance, got none; name one")
    rates = shares(asked.acceptance or "", "--acceptance")
    return [questions.from_rates(times, asked.draft, rates, batch_size=size, **limits) for size in sizes]


def _hardware(options: HardwareOptions, asked: Asked, *, sizes: Sequence[int]) -> list[LoadPlan]:
    from paceline.neuron.hardware_speed import HardwareQuestion, from_hardware
    from paceline.neuron.round_graphs import read_config, read_draft

    if options.target is None or asked.draft is None or asked.acceptance is None:
        raise ConfigurationError("--acceptance: expected --target, --draft and --acceptance; give all three")
    target = read_config(options.target)
    question = HardwareQuestion(
        target,
        read_draft(Path(asked.draft), target),
        neuron_instance(options.instance),
        shares(asked.acceptance, "--acceptance"),
        options.acceptance_error,
        asked.max_depth,
        numbers(",".join(options.tp_degree), "--tp-degree") if options.tp_degree else (),
        quantization=options.quantization,
    )
    return from_hardware(question, sizes)


def _verified(folder: Path, trace: LoadedTrace, plans: Sequence[LoadPlan]) -> list[dict[str, Any]]:
    """Run the fastest drafter and plain decoding at every load; predicted against measured."""
    from paceline.experiments import questions, runner, store, tuned
    from paceline.experiments.round_times import load_times

    times = load_times(folder / "round_times.json").of(trace)
    config, found = store.read_config(folder), list[dict[str, Any]]()
    for plan in plans:
        drafting = next((one for one in plan.candidates if not one.plain), None)
        if drafting is None:
            continue
        own = tuned.verifying(config, trace, drafting.policy, batch_size=plan.batch_size)
        with console.bar(console.err(), "verify", 1) as shown:
            kept = store.Store(folder / "verify")
            (result,) = runner.run(runner.plan(own, None), kept, lambda text, *_, bar=shown: bar.step(text))
        speeds: list[float] = []
        for label, policy, figure in (
            (drafting.label, drafting.policy, "tokens_per_second"),
            ("plain", questions.Policy(()), "plain_tokens_per_second"),
        ):
            foretold = tuned.predicted(trace, times, policy, result=result)
            speeds.append(float(result.totals[figure]))
            figures = {"predicted": foretold, "measured": speeds[-1], "error": foretold / speeds[-1] - 1}
            found.append({"batch_size": plan.batch_size, "label": label, **figures})
        if speeds[0] < speeds[1]:
            said = f"warning: {drafting.label} was {speeds[0] / speeds[1]:.2f} times as fast as plain decoding. "
            said += "Run it again on a quiet machine, and serve without a draft if it stays so"
            console.say(console.err(), said, style="yellow")
    return found


def _save_models(file: Path, folder: Path, trace: LoadedTrace, *, plan: LoadPlan) -> None:
    from paceline.decoder.weights.atomic_write import save_bytes
    from paceline.experiments import store, tuned
    from paceline.experiments.config import cells

    config, policy = store.read_config(folder), plan.best.policy
    own = tuned.verifying(config, trace, policy, batch_size=plan.batch_size)
    save_bytes(file, [tuned.models_file(config, policy, next(cells(own))).encode()])
    console.say(console.err(), f"written: {file}")


def _show(plan: LoadPlan) -> None:
    rows = [
        (
            *(one.label, f"{one.tokens_per_round:.2f}", f"{one.round_seconds * 1e3:.2f}"),
            *(f"{one.tokens_per_second:.1f}", f"{one.speedup:.2f}", f"{one.low:.2f} to {one.high:.2f}"),
        )
        for one in plan.candidates[:8]
    ]
    columns = ("candidate", "tokens per round", "ms per round", "tokens/s", "speedup", "interval")
    console.table(*columns, rows=rows, title=f"batch size {plan.batch_size}")
    console.say(console.out(), plan.verdict)
