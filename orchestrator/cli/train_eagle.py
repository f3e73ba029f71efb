"""`paceline train eagle` and `paceline convert-eagle`: options and their wiring; the work is in the head's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.config_options import command
from paceline.cli.train import (
    STOPPED,
    Data,
    DataDtype,
    Out,
    Target,
    WorkDir,
    reports,
    results,
    token_stream,
    until_terminated,
)
from paceline.decoder.models.config import ModelConfig
from paceline.eagle.options import EagleHeadOptions, EagleTraining
from paceline.training.options import CachedTextOptions

app = typer.Typer()


@command(app, "eagle")
def eagle(
    target: Target,
    data: Data,
    out: Out,
    *,
    head: EagleHeadOptions,
    texts: CachedTextOptions,
    training: EagleTraining,
    work_dir: WorkDir = None,
    data_dtype: DataDtype = None,
) -> None:
    """Train an EAGLE head on a frozen target. The last line of stdout is a JSON object with the acceptance."""
    with console.refusals():
        from paceline.eagle import train

        stream = token_stream(data, target, dtype=data_dtype)
        train.check(head, texts, ModelConfig.from_pretrained(target))
        results(out)
        work = results(work_dir or out / "work")
        with reports(f"training an EAGLE-{head.version} head") as report, until_terminated():
            shares = train.train(
                target,
                stream,
                head,
                texts=texts,
                options=training,
                work=work,
                out=out,
                report=lambda done, steps, loss: report(f"training, loss {loss:.3f}", done, steps),
            )
    if shares is None:
        console.say(console.err(), STOPPED)
        raise typer.Exit(3)
    shown = " ".join(f"{share:.3f}" for share in shares)
    console.say(console.err(), f"greedy chains of 1, 2, ... drafts that are all right: {shown}")
    typer.echo(json.dumps({"version": head.version, "greedy chains": shares}))


@app.command(name="convert-eagle")
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of an EAGLE head, in any layout.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    target: Annotated[Path, typer.Option(help="Folder of the target the head is for.")],
    layout: Annotated[str, typer.Option(help="paceline, eagle, nxd or speculators.")] = "paceline",
) -> None:
    """Rewrite an EAGLE head in another layout: ours, the EAGLE repository's, NxD Inference's or speculators'."""
    with console.refusals():
        from paceline.eagle import checkpoint
        from paceline.training.frozen_model import FrozenTarget

        frozen, sizes = FrozenTarget(target), ModelConfig.from_pretrained(target)
        tensors = checkpoint.TargetTensors(frozen.embedding, frozen.output.detach(), sizes.num_layers)
        checkpoint.convert(source, results(out), sizes, layout=layout, tensors=tensors, base=str(target))
    console.say(console.out(), str(out))
