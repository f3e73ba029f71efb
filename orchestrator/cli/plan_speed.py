"""`paceline plan-speed`: the fastest mode, depth and cores at each load; `paceline.experiments` computes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
    from paceline.experiments.speed_plan import LoadPlan

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class MeasuredOptions:
    """Where measured times and acceptance come from."""

    experiment: Annotated[
        Path | None, typer.Option(help="Folder of `paceline experiment run`: its measured times of rounds.")
    ] = None
    trace: Annotated[Path | None, typer.Option(help="A trace below its traces/, for exact acceptance.")] = None
    drafter: Annotated[str | None, typer.Option(help="With --acceptance: the timed drafter that it is of.")] = None
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the best of every load beside plain decoding. Needs --trace.")
    ] = False
    time_error: Annotated[float, typer.Option(help="Relative error of a predicted time to allow for.")] = 0.1


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """A Neuron chip, by arithmetic."""

    target: Annotated[Path | None, typer.Option(help="config.json of the target, or a folder with one.")] = None
    draft: Annotated[Path | None, typer.Option(help="config.json of the draft, or a folder with one.")] = None
    instance: Annotated[str, typer.Option(help="Instance type of the inf2 or trn1 family.")] = "inf2.48xlarge"
    tp: Annotated[tuple[int, ...] | None, typer.Option(help="Degree to try; repeatable. Default: all.")] = None
    acceptance_error: Annotated[float, typer.Option(help="How far the acceptance may be off.")] = 0.05


@command(app, "plan-speed")
def plan_speed(
    measured: MeasuredOptions,
    hardware: HardwareOptions,
    *,
    acceptance: Annotated[
        str | None, typer.Option(help="Conditional acceptance rate, or rates by position: 0.8 or 0.8,0.7,0.6.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Loads: requests decoded at the same time.")] = "1",
    max_depth: Annotated[int, typer.Option(min=1, help="Deepest draft to look at.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Say which mode, draft length and cores are the fastest at each load, how sure that is, or not to speculate.

    From measured times (--experiment), or by arithmetic about a Neuron chip (--target, --draft, --instance).
    """
    with console.refusals():
        from paceline.experiments.whatif import parse_depths

        sizes = parse_depths(batch_sizes, "--batch-sizes")
        if min(sizes) < 1:
            raise ConfigurationError(f"--batch-sizes {batch_sizes!r}: a batch has at least one request")
        if (measured.experiment is None) == (hardware.target is None):
            raise ConfigurationError("give --experiment for measured times, or --target and --draft for a Neuron chip")
        if measured.verify and measured.experiment is None:
            raise ConfigurationError("--verify runs what was measured before; it needs --experiment and --trace")
        if measured.experiment is not None:
            plans = _measured(measured, measured.experiment, acceptance, sizes=sizes, max_depth=max_depth)
        else:
            plans = _hardware(hardware, acceptance, sizes=sizes, max_depth=max_depth)
        checks = _verified(measured, plans) if measured.verify else []
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


def _measured(
    options: MeasuredOptions, folder: Path, acceptance: str | None, *, sizes: Sequence[int], max_depth: int
) -> list[LoadPlan]:
    from paceline.experiments import speed_plan
    from paceline.experiments.round_times import PLAIN, load_times
    from paceline.experiments.trace import load_trace

    timed = load_times(folder / "round_times.json")
    error = options.time_error
    if (options.trace is None) == (acceptance is None):
        raise ConfigurationError("acceptance comes from --trace, or from --acceptance; give one of them")
    if options.trace is not None:
        trace = load_trace(options.trace)
        times = timed.of(trace)
        return [
            speed_plan.from_trace(trace, times, batch_size=size, max_depth=max_depth, error=error) for size in sizes
        ]
    if options.verify:
        raise ConfigurationError("--verify runs the prompts of a trace; give --trace")
    times = timed.alone()
    if options.drafter is None:
        names = ", ".join(sorted({name for name, *_ in times.rounds} - {PLAIN}))
        raise ConfigurationError(f"say with --drafter whose acceptance this is; {names} were timed")
    rates = speed_plan.parse_rates(acceptance or "")
    return [
        speed_plan.from_rates(times, options.drafter, rates, batch_size=size, max_depth=max_depth, error=error)
        for size in sizes
    ]


def _hardware(
    options: HardwareOptions, acceptance: str | None, *, sizes: Sequence[int], max_depth: int
) -> list[LoadPlan]:
    from paceline.diagnostics.round_graphs import read_config
    from paceline.experiments.speed_plan import HardwareQuestion, from_hardware, parse_rates
    from paceline.placement.planning.detect import instance_named

    if options.target is None or options.draft is None or acceptance is None:
        raise ConfigurationError("a plan by arithmetic needs --target, --draft and --acceptance")
    question = HardwareQuestion(
        read_config(options.target),
        read_config(options.draft),
        instance_named(options.instance),
        parse_rates(acceptance),
        options.acceptance_error,
        max_depth,
        options.tp or (),
    )
    return from_hardware(question, sizes)


def _verified(options: MeasuredOptions, plans: Sequence[LoadPlan]) -> list[dict[str, Any]]:
    """Run the fastest drafter and plain decoding at every load; predicted against measured."""
    from paceline.experiments import runner, speed_plan, store, tune
    from paceline.experiments.round_times import load_times
    from paceline.experiments.trace import load_trace
    from paceline.experiments.whatif import Policy

    assert options.experiment is not None and options.trace is not None
    trace = load_trace(options.trace)
    times = load_times(options.experiment / "round_times.json").of(trace)
    config, found = store.read_config(options.experiment), list[dict[str, Any]]()
    for plan in plans:
        drafting = next((one for one in plan.candidates if not one.plain), None)
        if drafting is None:
            continue
        policy = speed_plan.policy_of(drafting)
        planned = runner.plan(tune.verifying(config, trace, policy, batch_size=plan.batch_size), None)
        with progress.bar(console.err(), "verify", len(planned.cells)) as shown:
            (result,) = runner.run(
                planned, store.Store(options.experiment / "verify"), lambda text, *_, to=shown: to.step(text)
            )
        run = tune.checked(trace, times, policy, result=result)
        plain = tune.checked(trace, times, Policy(()), result=result)
        for label, predicted, seen in (
            (drafting.label, run.predicted, run.measured),
            ("plain", plain.predicted, run.plain),
        ):
            figures = {"predicted": predicted, "measured": seen, "error": predicted / seen - 1}
            found.append({"batch_size": plan.batch_size, "label": label, **figures})
    return found


def _show(plan: LoadPlan) -> None:
    table = Table(
        "way", "tokens a round", "ms a round", "tokens/s", "speed-up", "interval", title=f"batch size {plan.batch_size}"
    )
    for one in plan.candidates[:8]:
        figures = f"{one.tokens_per_round:.2f}", f"{one.round_seconds * 1e3:.2f}", f"{one.tokens_per_second:.1f}"
        table.add_row(Text(one.label), *figures, f"{one.speedup:.2f}", f"{one.low:.2f} to {one.high:.2f}")
    console.out().print(table)
    console.say(console.out(), plan.verdict)
