"""`paceline serve`: the models of a file behind OpenAI's API, on this machine's loopback by default."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.config_options import command
from paceline.cli.options import InstanceName, ModelsFile
from paceline.cli.plan import find_instance, plan_table
from paceline.core.errors import BackendError
from paceline.placement import plan, read_fault_policy, read_models
from paceline.placement.planning import validate_plan

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server runs."""

    instance: InstanceName = None
    host: Annotated[str, typer.Option(help="Address to listen at; anybody who reaches it can use it.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster to join; default: start one here.")] = None
    print_serve_config: Annotated[
        bool, typer.Option("--print-serve-config", help="Print the file for `serve deploy`; start nothing.")
    ] = False


@command(app, "serve")
def serve_models(models: ModelsFile, options: ServeOptions) -> None:
    """Serve the models of a file: /v1/models, /v1/completions, /v1/chat/completions. Ends with Ctrl-C."""
    with console.refusals():
        planned, policy = plan(read_models(models), find_instance(options.instance)), read_fault_policy(models)
        validate_plan.check(planned)
        try:
            from paceline.serving.app import deploy_config
            from paceline.serving.launch import serve_plan
        except ImportError as error:
            raise BackendError("serving needs Ray Serve: pip install 'paceline[serve]'") from error
        if options.print_serve_config:
            import yaml

            config = deploy_config(models, options.instance, host=options.host, port=options.port)
            typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
            return
        console.err().print(plan_table(planned))
        url = f"http://{options.host}:{options.port}/v1"
        ready = partial(console.say, console.out(), f"serving at {url}")
        serve_plan(planned, policy, host=options.host, port=options.port, address=options.address, ready=ready)
