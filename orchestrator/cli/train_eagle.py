"""`paceline train eagle` and `paceline convert-eagle`: options and their wiring; the work is in the head's folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.train import PRECISION, STOPPED, reports, results, token_stream, until_terminated
from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import checkpoint, pipeline
from paceline.eagle.corpus import CorpusOptions, FrozenTarget
from paceline.eagle.training import TrainingOptions

_GIGA = 1e9

app = typer.Typer(help="Train EAGLE heads.", add_completion=False)
files = typer.Typer(help="Files of EAGLE heads.", add_completion=False)


@app.command()
def eagle(
    target: Annotated[Path, typer.Option(help="Folder of the model the head is for.")],
    data: Annotated[list[Path], typer.Option(help="Text, or .bin of uint16 ids; a file or folder; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for the head.")],
    version: Annotated[int, typer.Option(help="1 (also for EAGLE-2) or 3.")] = 3,
    layers: Annotated[list[int] | None, typer.Option(help="Version 3: a residual stream to read; repeatable.")] = None,
    draft_vocabulary: Annotated[int | None, typer.Option(help="Version 3: so many ids can be drafted.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to train on, repeats counted.")] = 1_000_000,
    passes: Annotated[int | None, typer.Option(help="Of the training-time test. Default: 7; version 1: 1.")] = None,
    feature_weight: Annotated[float, typer.Option(help="Version 1: of the feature loss.")] = 1.0,
    law_weight: Annotated[float, typer.Option(help="Version 1: of the cross-entropy.")] = 0.1,
    rate: Annotated[float, typer.Option(help="Largest learning rate.")] = 2e-3,
    rows: Annotated[int, typer.Option(help="Texts in a step; a divisor of 64.")] = 8,
    precision: Annotated[str, typer.Option(help=PRECISION)] = "f32",
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    keep: Annotated[float, typer.Option(help="GB of states to keep on disk; 0 = none.")] = 2.0,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; run again to go on.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder for what is kept meanwhile; default: OUT/work.")] = None,
) -> None:
    """Train an EAGLE head on a frozen target. The last line of stdout is a JSON object with the acceptance."""
    with console.refusals():
        plan = pipeline.Plan(version=version, layers=tuple(layers or ()), draft_vocab_size=draft_vocabulary)
        options = TrainingOptions(
            tokens=tokens,
            passes=(7 if version == 3 else 1) if passes is None else passes,
            feature_weight=feature_weight,
            law_weight=law_weight,
            rate=rate,
            rows=rows,
            precision=precision,
            minutes=minutes,
        )
        if not 0 <= keep * _GIGA < math.inf:
            raise ConfigurationError(f"--keep {keep} is no size; give gigabytes, or 0 to keep nothing")
        corpus = CorpusOptions(length=length, prompt=length // 4, keep_bytes=int(keep * _GIGA))
        stream = token_stream(data, target)
        pipeline.check(plan, corpus, ModelConfig.from_pretrained(target))
        results(out)
        folder = results(work or out / "work")
        with reports(f"training an EAGLE-{version} head") as report, until_terminated():
            shares = pipeline.train(
                target,
                stream,
                plan,
                corpus=corpus,
                options=options,
                work=folder,
                out=out,
                report=lambda done, steps, loss: report(f"training, loss {loss:.3f}", done, steps),
            )
    if shares is None:
        console.say(console.err(), STOPPED)
        raise typer.Exit(3)
    shown = " ".join(f"{share:.3f}" for share in shares)
    console.say(console.err(), f"greedy chains of 1, 2, ... drafts that are all right: {shown}")
    typer.echo(json.dumps({"version": version, "greedy chains": shares}))


@files.command(name="convert-eagle")
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of an EAGLE head, in any layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    target: Annotated[Path, typer.Option(help="Folder of the target the head is for.")],
    layout: Annotated[str, typer.Option(help="paceline, eagle, nxd or speculators.")] = "paceline",
) -> None:
    """Rewrite an EAGLE head in another layout: ours, the EAGLE repository's, NxD Inference's or speculators'."""
    with console.refusals():
        head = FrozenTarget(target, ()).head
        checkpoint.convert(
            source, results(out), ModelConfig.from_pretrained(target), layout=layout, head=head, base=str(target)
        )
    console.say(console.out(), str(out))
