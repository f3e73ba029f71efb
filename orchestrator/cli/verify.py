"""`paceline verify`: tests of a target, a draft and a rule of the user's own; `paceline.diagnostics` has them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console, prompt_files
from paceline.cli.config_options import command
from paceline.cli.load import checked, load
from paceline.cli.options import AsJson, LoaderOptions, TargetFolder
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class TestOptions:
    """How much is tried, and on what."""

    minutes: Annotated[
        float, typer.Option(help="Time for the tests of all batch sizes, besides a first pass of each.")
    ] = 2.0
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to test, one after the other.")] = "1,4"
    only: Annotated[tuple[str, ...] | None, typer.Option(help="Make this test alone; repeatable. Default: all.")] = None
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with a "prompt" each. Default: texts of the target.')
    ] = None
    seed: Annotated[int, typer.Option(help="Of all texts; another one tries others.")] = 0


@command(app)
def verify(
    target: TargetFolder,
    config: SpeculativeConfig,
    *,
    loader: LoaderOptions,
    tests: TestOptions,
    as_json: AsJson = False,
) -> None:
    """Test that a target with your draft writes what plain decoding writes, on your models. Exit code 1 on a failure.

    Says what was tried, and which deviation each test would have found. Lossy acceptance rules are reported as such.
    """
    with console.refusals():
        sizes = _sizes(tests.batch_sizes, loader.batch_size)
        targets = [checked(target, replace(loader, batch_size=size), config) for size in sizes]
        from paceline.auto_drafter import load_draft_models
        from paceline.diagnostics.verify import VerifySettings
        from paceline.diagnostics.verify import verify as run_tests
        from paceline.text.tokenizer import has_tokenizer, load_tokenizer, prompt_ids

        settings = VerifySettings(minutes=tests.minutes / len(sizes), only=tests.only or (), seed=tests.seed)
        if tests.prompts is not None or has_tokenizer(target):
            tokenizer = load_tokenizer(target)
            texts = () if tests.prompts is None else prompt_files.prompts(tests.prompts)
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


def _sizes(text: str, of_loader: int) -> list[int]:
    """``1,4`` -> [1, 4].

    Raises:
        ConfigurationError: they are no numbers, or ``--batch-size`` says something else.
    """
    if of_loader != asdict(LoaderOptions())["batch_size"]:
        return [of_loader]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"--batch-sizes {text!r}: write numbers from 1 on, such as 1,4")
    return sizes
