"""`paceline serve`, `plan` and `models`: serve models over OpenAI's API, assign cores, and list loaded models.

On this machine's loopback by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
from rich.table import Table

from paceline.cli import console
from paceline.cli.options import BATCH_SIZE, AsJson, InstanceName, ModelsFile, command
from paceline.config import SpeculativeConfig
from paceline.core.errors import BackendError, ConfigurationError, WorkerError
from paceline.decoder.options import LoadOptions
from paceline.decoder.weights.folder import resolved
from paceline.draft_checks import prepared
from paceline.loadable import loadable
from paceline.placement import FaultPolicy, ModelSpec, Plan, plan, read_fault_policy, read_models
from paceline.placement.planning import planner
from paceline.placement.planning.groups import fit_together, plan_groups
from paceline.placement.planning.instances import instance_named
from paceline.placement.planning.model_specs import models_of
from paceline.placement.planning.plan import marks, render_plan
from paceline.serving.settings import ApiSettings, is_loopback

app = typer.Typer()

API_KEY = "PACELINE_API_KEY"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Address of the server."""

    instance: InstanceName = None
    host: Annotated[str, typer.Option(help="Address to listen on; any other than loopback needs an API key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster to join. Default: start one on this machine.")
    ] = None
    print_serve_config: Annotated[
        bool, typer.Option("--print-serve-config", help="Print the file for `serve deploy`, and start nothing.")
    ] = False


@dataclass(frozen=True, slots=True)
class OneModel:
    """A model to serve without a file; separate options say how it is loaded and drafted for."""

    target: Annotated[
        Path | None,
        typer.Option(help="Target to serve without a models file: a folder or the name of a fetched model."),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the model in requests. Default: the folder's name.")] = None
    batch_size: Annotated[int, typer.Option("--batch-size", "--max-num-seqs", help=BATCH_SIZE)] = 8
    max_waiting: Annotated[
        int | None,
        typer.Option(help="Maximum number of requests that wait for a slot; more get status 429. Default: 1024."),
    ] = None
    tp_degree: Annotated[
        int | None,
        typer.Option(
            "--tp-degree",
            "--tensor-parallel-size",
            help=(
                "Tensor-parallel degree: number of cores that the model is sharded over. Default: the smallest "
                "that fits."
            ),
        ),
    ] = None

    def entries(self, keys: Mapping[str, object]) -> list[dict[str, object]]:
        assert self.target is not None
        there = self.target.exists()  # else it may be the name of a fetched model, or an id of the hub
        values = {
            "name": self.name or resolved(self.target).name,
            "path": str(resolved(self.target) if there else self.target),
            "batch_size": self.batch_size,
            "tp_degree": self.tp_degree,
            "max_waiting": self.max_waiting,
            **keys,
        }
        return [{key: value for key, value in values.items() if value is not None}]


@command(app, "serve")
def serve_models(
    options: ServeOptions,
    settings: ApiSettings,
    model: OneModel,
    *,
    keys: Annotated[dict[str, Any], LoadOptions, SpeculativeConfig],
    models: Annotated[Path | None, typer.Argument(help="YAML file with a list `models`; or give --target.")] = None,
) -> None:
    """Serve models over OpenAI's API: chat, completions, responses; a page at /, and /metrics. Stop it with Ctrl-C."""
    with console.refusals():
        if not settings.api_keys and not is_loopback(options.host):
            raise ConfigurationError(
                f"--api-key: expected a key, since --host {options.host} makes the server reachable for others, got "
                f"none; give --api-key (or set {API_KEY}), or listen on 127.0.0.1"
            )
        source = _source(models, model, keys)
        specs, policy = _read(source)
        groups = plan_groups(specs, instance_named(options.instance))
        if options.address is None and not options.print_serve_config:
            groups = fit_together(groups, groups[0].plan.instance)
        for group in groups:
            planner.check(group.plan)
            first = group.plan.placements[0]  # what its target would refuse when it is loaded is refused now
            folder, own = first.model.folder, replace(first.model.options, tp_degree=len(first.cores))
            assert folder is not None, "a plan that can be run has one"
            prepared(first.model.speculative, loadable(folder, own))
        try:
            from paceline.serving.launch import serve_groups
            from paceline.serving.ray_app import deploy_config
        except ImportError as error:
            raise BackendError(
                "serving needs Ray Serve, which is not installed; run pip install 'paceline[serve]'"
            ) from error
        if options.print_serve_config:
            import yaml

            config = deploy_config(source, options.instance, settings, host=options.host, port=options.port)
            typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
            return
        for group in groups:
            console.err().print(_plan_table(group.plan))
            if group.undrafted:
                console.say(console.err(), f"{group.name} decodes without its draft: {group.undrafted}", style="yellow")
        url = f"http://{options.host}:{options.port}/v1"
        ready = partial(console.say, console.out(), f"serving at {url}")
        progress = partial(console.say, console.err())
        serve_groups(
            groups, policy, settings, host=options.host, port=options.port, address=options.address, ready=ready,
            progress=progress,
        )  # fmt: skip


def _source(models: Path | None, model: OneModel, keys: Mapping[str, object]) -> Path | list[dict[str, object]]:
    if (models is None) == (model.target is None):
        raise ConfigurationError(
            "expected either a models file or --target DIR for a single model, got both or neither; give one of them"
        )
    return model.entries(keys) if models is None else models


def _read(source: Path | Sequence[Mapping[str, object]]) -> tuple[tuple[ModelSpec, ...], FaultPolicy]:
    if isinstance(source, Path):
        models = read_models(source)
        return models, read_fault_policy(source, models)
    models = models_of(source, folder=Path(), where="the command line")
    return models, FaultPolicy().for_models(models)


_MIB = 1 << 20


@app.command(name="plan")
def plan_models(models: ModelsFile, instance: InstanceName = None, as_json: AsJson = False) -> None:
    """Assign the models of a file to the cores of an instance. Starts nothing. Exit status 2 if there is no plan."""
    with console.refusals():
        planned = plan(read_models(models), instance_named(instance))
        read_fault_policy(models)  # nothing is started here, but errors in the file show now
    if as_json:
        typer.echo(json.dumps(planned.to_dict()))
        return
    console.out().print(_plan_table(planned))
    console.say(console.out(), render_plan(planned))
    for item in planned.placements:
        if item.why:
            console.say(console.out(), f"{item.label}: {item.why}; by arithmetic, not measured")
    left = planned.fragmentation
    runs = ", ".join(f"{count} of {degree}" for degree, count in left.runs if count)
    console.say(console.out(), f"\nfree: {left.free} cores" + (f"; aligned runs: {runs}" if runs else ""))


def _plan_table(planned: Plan) -> Table:
    table = Table(title=f"plan for {planned.instance.name}", title_justify="left")
    for column in ("", "model", "role", "cores", "tp", "MiB/core", "of", "CPUs"):
        table.add_column(column, justify="right" if column in ("tp", "MiB/core", "of") else "left")
    letters = marks(planned)
    for item in planned.placements:
        role = item.role if not item.drafts_for else "drafts for " + ", ".join(name for name, _ in item.drafts_for)
        size, limit = item.footprint.total / _MIB, planned.instance.memory / _MIB
        table.add_row(
            letters[item.label], item.label, role, str(item.cores), str(len(item.cores)),
            f"{size:.0f}", f"{limit:.0f}", "-".join(map(str, item.affinity)),
        )  # fmt: skip
    return table


_ROUTE = "/admin/models"  # `paceline.serving.api`
_TIMEOUT_S = 900.0  # a model may take minutes to load


Url = Annotated[str, typer.Option(help="URL of the service.")]
Key = Annotated[str | None, typer.Option(envvar=API_KEY, help="API key of the service. Default: none.")]
Name = Annotated[str, typer.Argument(help="Name of the model, as in requests.")]

_HERE = "http://127.0.0.1:8000"


@app.command(name="list")
def list_models(url: Url = _HERE, api_key: Key = None, as_json: AsJson = False) -> None:
    """All models of the service, and whether they are in memory."""
    with console.refusals():
        models = _ask(url, api_key)["models"]
    if as_json:
        typer.echo(json.dumps(models))
        return
    rows = []
    for one in models:
        after = "" if one["idle_ttl_s"] is None else f"{one['idle_ttl_s']:g}"
        pinned = "yes" if one["pinned"] else ""
        rows.append((one["name"], one["state"], one["load"], pinned, one["running"], f"{one['idle_s']:.0f}", after))
    console.table("model", "state", "load", "pinned", "running", "idle, s", "unloaded after, s", rows=rows)


@app.command()
def load(name: Name, url: Url = _HERE, api_key: Key = None) -> None:
    """Load a model; idle models that are not pinned leave where it needs their room. Ends when it can answer."""
    _act("load", {"model": name}, url=url, api_key=api_key)


@app.command()
def unload(name: Name, url: Url = _HERE, api_key: Key = None) -> None:
    """Unload a model, after the requests that it has."""
    _act("unload", {"model": name}, url=url, api_key=api_key)


@app.command()
def pin(name: Name, url: Url = _HERE, api_key: Key = None) -> None:
    """Keep a model in memory."""
    _act("pin", {"model": name, "pinned": True}, url=url, api_key=api_key)


@app.command()
def unpin(name: Name, url: Url = _HERE, api_key: Key = None) -> None:
    """Let a model leave again."""
    _act("pin", {"model": name, "pinned": False}, url=url, api_key=api_key)


def _act(action: str, body: Mapping[str, object], *, url: str, api_key: str | None) -> None:
    with console.refusals():
        state = _ask(url, api_key, action, body=body)
    console.say(console.out(), f"{state['name']}: {state['state']}" + (", pinned" if state["pinned"] else ""))


def _ask(url: str, api_key: str | None, action: str = "", *, body: Mapping[str, object] | None = None) -> Any:
    """The response of the service; WorkerError: there is none, or a refusal."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    address = url.rstrip("/").removesuffix("/v1") + _ROUTE + (f"/{action}" if action else "")
    try:
        request = Request(address, None if body is None else json.dumps(body).encode(), headers)
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise WorkerError(_message(error)) from error
    except (URLError, OSError, ValueError) as error:
        raise WorkerError(
            f"--url: no service responds at {url} ({error}); correct it, or start a service with paceline serve"
        ) from error


def _message(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the service answers with status {error.code}; is it paceline's?"
