"""`paceline serve`: the models of a file behind OpenAI's API, on this machine's loopback unless told otherwise."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.plan import machine, plan_table
from paceline.core.errors import BackendError
from paceline.placement import plan, read_care, read_models
from paceline.placement.planning import validate_plan


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
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster to join; default: start one here.")] = None,
    config: Annotated[bool, typer.Option("--config", help="Print the file for `serve deploy`; start nothing.")] = False,
) -> None:
    """Serve the models of a file: /v1/models, /v1/completions, /v1/chat/completions. Ends with Ctrl-C."""
    with console.refusals():
        made, care = plan(read_models(models), machine(instance)), read_care(models)
        validate_plan.check(made)
        try:
            from paceline.serving.app import deploy_config
            from paceline.serving.launch import run
        except ImportError as error:
            raise BackendError("serving needs Ray Serve: pip install 'paceline[serve]'") from error
        if config:
            import yaml

            typer.echo(yaml.safe_dump(deploy_config(models, instance, host=host, port=port), sort_keys=False), nl=False)
            return
        console.err().print(plan_table(made))
        said = partial(console.say, console.out(), f"serving at http://{host}:{port}/v1")
        run(made, care, host=host, port=port, address=address, ready=said)
