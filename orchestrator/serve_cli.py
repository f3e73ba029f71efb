"""`paceline serve`: the models of a file behind OpenAI's API, on this machine's loopback unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline import console
from paceline.core.errors import BackendError
from paceline.placement import plan, read_models, runnable
from paceline.plan_cli import machine, plan_table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="serve")(serve_models)


def serve_models(
    models: Annotated[Path, typer.Argument(help="YAML file with a list `models`.")],
    *,
    instance: Annotated[
        str | None, typer.Option(help="Instance type, such as inf2.48xlarge, or cpu; default: what neuron-ls finds.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; anybody who reaches it can use it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster; default: start one here.")] = None,
) -> None:
    """Serve the models of a file: /v1/models, /v1/completions, /v1/chat/completions. Ends with Ctrl-C."""
    with console.refusals():
        made = plan(read_models(models), machine(instance))
        runnable.check(made)
        try:
            from paceline.serving.run import run
        except ImportError as error:
            raise BackendError("serving needs Ray Serve: pip install 'paceline[serve]'") from error
        console.err().print(plan_table(made))
        place = f"http://{host}:{port}/v1"
        run(
            made, host=host, port=port, address=address, ready=lambda: console.say(console.out(), f"serving at {place}")
        )
