"""The command line, `paceline`: every command, gathered from its module.

Results go to stdout, the rest to stderr. Shared options are in `paceline.cli.options`, what is shown in
`paceline.cli.console`, progress in `paceline.cli.progress`.
"""

from __future__ import annotations

from typing import Annotated

import typer

import paceline
from paceline.cli import (
    bench,
    chat,
    compile,  # noqa: A004
    console,
    cost,
    diagnostics,
    experiment,
    experiment_questions,
    export_hlo,
    fetch,
    generate,
    medusa_tree,
    models,
    plan,
    plan_speed,
    serve,
    tables,
    train,
    train_eagle,
    verify,
)

app = typer.Typer(
    cls=console.Commands,
    help="Decode with several models at once: small models set the pace, the big one decides.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
train.app.registered_commands += train_eagle.app.registered_commands
app.add_typer(train.app, name="train")
experiment.app.registered_commands += experiment_questions.app.registered_commands
app.add_typer(experiment.app, name="experiment")
app.add_typer(models.app, name="models")
for module in (
    generate,
    chat,
    compile,
    bench,
    plan,
    plan_speed,
    cost,
    export_hlo,
    serve,
    fetch,
    tables,
    diagnostics,
    verify,
    medusa_tree,
):
    app.registered_commands += module.app.registered_commands
app.registered_commands += train_eagle.files.registered_commands


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Say the version and leave.")] = False) -> None:
    if version:
        typer.echo(paceline.__version__)
        raise typer.Exit
