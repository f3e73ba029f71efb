"""`paceline doctor`, `selftest` and `verify`: options and printing; the work is in `paceline.checks`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.checks.findings import Finding
from paceline.cli import console
from paceline.cli.options import AsJson, TargetFolder, checked, command, load, numbers, read_prompts
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.options import LoadOptions

LEVELS = {"ok": ("good", "ok  "), "note": ("note", "note"), "FAILED": ("bad", "BAD ")}
"""Of a finding of `paceline doctor`, in JSON and for people."""

app = typer.Typer()


@app.command(name="doctor")
def show_doctor(
    target: Annotated[Path | None, typer.Option(help="With --draft: the target that it drafts for.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Drafter whose fit to the target is measured, as in `generate`.")
    ] = None,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(help='With --draft: file of JSON lines, each with a "prompt". Default: a few questions.'),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: compilers, cache, Neuron chips and SDK. Exit code 1 if something is broken.

    With --target and --draft: also whether the drafter fits, by what is accepted and by the times of steps.
    """
    from paceline.checks import doctor

    with console.refusals():
        fit = None if target is None and draft is None else _fit(target, draft, prompts)
    found = [*doctor.examine(), *([] if fit is None else [fit])]
    healthy = all(one.passed for one in found)
    if as_json:
        lines = [{"subject": one.name, "level": LEVELS[one.status][0], "text": one.seen} for one in found]
        typer.echo(json.dumps({"healthy": healthy, "lines": lines}))
    else:
        for one in found:
            typer.echo(f"{LEVELS[one.status][1]} {one.name}: {one.seen}")
    if not healthy:
        raise typer.Exit(1)


def _fit(target: Path | None, draft: str | None, prompts: Path | None) -> Finding:
    from paceline.checks import doctor
    from paceline.text.chat import chat_ids
    from paceline.text.tokenizer import has_tokenizer, load_tokenizer, prompt_ids

    if target is None or draft is None:
        raise ConfigurationError("--draft: expected --target and --draft together, got one of them; give both")
    config = SpeculativeConfig(draft=draft)
    decoder = load(checked(target, LoadOptions(), config))
    ids: list[list[int]] = []
    if prompts is not None or has_tokenizer(target):
        tokenizer = load_tokenizer(target)
        texts = doctor.QUESTIONS if prompts is None else read_prompts(prompts)
        chats = prompts is None and getattr(tokenizer, "chat_template", None)
        ids = [
            chat_ids(tokenizer, [{"role": "user", "content": text}]) if chats else prompt_ids(tokenizer, text)
            for text in texts
        ]
    return doctor.examine_draft(decoder, config, ids)


@app.command(name="selftest")
def show_selftest(
    backend: Annotated[
        str | None,
        typer.Option(
            help=f"Backend to test: {', '.join(BACKENDS)}. Default: native; with --batch-invariance, all that work "
            "here."
        ),
    ] = None,
    *,
    batch_invariance: Annotated[
        bool,
        typer.Option(
            "--batch-invariance",
            help="Compare the bits of rows decoded together with those of rows decoded one by one.",
        ),
    ] = False,
    target: Annotated[
        Path | None,
        typer.Option(help="With --batch-invariance: folder of the model to test. Default: a tiny random one."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="With --batch-invariance: largest number of rows decoded together. Default: 17.")
    ] = None,
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
                    raise ConfigurationError(f"{name}: expected --batch-invariance with it; add that, or omit {name}")
            passed, text = _check_tokens(backend or "native", as_json=as_json)
    typer.echo(text)
    if not passed:
        raise typer.Exit(1)


def _check_tokens(backend: str, *, as_json: bool) -> tuple[bool, str]:
    from paceline.checks import selftest  # loads much that the other commands do not need

    selftest.known(backend)
    checks = []
    for check in selftest.run(backend):
        checks.append(check)
        console.say(console.err(), f"{check.name}: {'ok' if check.passed else 'FAILED'}")
    passed = all(check.passed for check in checks)
    if as_json:
        names = ("name", "passed", "seen", "seconds")
        seen = [{name: getattr(check, name) for name in names} for check in checks]
        return passed, json.dumps({"backend": backend, "passed": passed, "checks": seen})
    return passed, selftest.report(backend, checks)


def _measure_bits(backend: str | None, target: Path | None, *, rows: int | None, as_json: bool) -> tuple[bool, str]:
    from paceline.checks import batch_invariance

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


@dataclass(frozen=True, slots=True)
class TestOptions:
    """How much is tried, and on what."""

    minutes: Annotated[
        float,
        typer.Option(
            "--max-minutes",
            "--minutes",
            help="Time limit of the tests of all batch sizes in minutes, not counting a first pass of each.",
        ),
    ] = 2.0
    batch_sizes: Annotated[
        str,
        typer.Option(
            "--batch-sizes", "--batch-size", help="Numbers of requests decoded at the same time, such as 1,4."
        ),
    ] = "1,4"
    only: Annotated[
        tuple[str, ...] | None, typer.Option(help="Name of a test to run; repeatable. Default: all tests.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(help='File of JSON lines, each with a "prompt". Default: sequences that the target generates.'),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of prompts and sampling; change it to test other outputs.")] = 0


@command(app, without={"batch_size"})
def verify(
    target: TargetFolder,
    config: SpeculativeConfig,
    *,
    loader: LoadOptions,
    tests: TestOptions,
    as_json: AsJson = False,
) -> None:
    """Test that a target with your draft generates the tokens of plain decoding, on your models. Exit code 1 on a
    failure.

    Says what was tried, and which deviation each test would have found. Lossy acceptance rules are reported as such.
    """
    with console.refusals():
        sizes = numbers(tests.batch_sizes, "--batch-sizes", least=1)
        targets = [checked(target, replace(loader, batch_size=size), config) for size in sizes]
        from paceline.auto_drafter import load_draft_models
        from paceline.checks.verify import VerifySettings
        from paceline.checks.verify import verify as run_tests
        from paceline.text.tokenizer import has_tokenizer, load_tokenizer, prompt_ids

        settings = VerifySettings(minutes=tests.minutes / len(sizes), only=tests.only or (), seed=tests.seed)
        if tests.prompts is not None or has_tokenizer(target):
            tokenizer = load_tokenizer(target)
            texts = () if tests.prompts is None else read_prompts(tests.prompts)
            ids = [prompt_ids(tokenizer, text) for text in texts]
            settings = replace(settings, tokenizer=tokenizer, prompts=ids)
        reports = []
        for found in targets:
            decoder = load(found)
            options = dict(load_draft_models(config, decoder, load))
            report = run_tests(
                decoder,
                options.pop("draft"),
                settings,
                say=lambda found: console.say(console.err(), f"{found.status} {found.name}"),
                **options,
            )
            reports.append(report)
    passed = all(report.passed for report in reports)
    if as_json:
        typer.echo(json.dumps({"passed": passed, "reports": [report.to_dict() for report in reports]}))
    else:
        typer.echo("\n\n".join(map(str, reports)))
    if not passed:
        raise typer.Exit(1)
