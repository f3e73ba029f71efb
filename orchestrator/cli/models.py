"""`paceline models`: which models of a running service are in memory; loads, unloads and pins them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import typer
from rich.table import Table

from paceline.cli import console
from paceline.cli.options import AsJson
from paceline.cli.serve import API_KEY
from paceline.core.errors import WorkerError

_ROUTE = "/admin/models"  # `paceline.serving.api`
_TIMEOUT_S = 900.0  # a model may take minutes to load

app = typer.Typer()

Url = Annotated[str, typer.Option(help="Of the service.")]
Key = Annotated[str | None, typer.Option(envvar=API_KEY, help="Its API key.")]
Name = Annotated[str, typer.Argument(help="Of the model, as requests call it.")]

_HERE = "http://127.0.0.1:8000"


@app.command(name="list")
def list_models(url: Url = _HERE, api_key: Key = None, as_json: AsJson = False) -> None:
    """All models of the service, and whether they are in memory."""
    with console.refusals():
        models = _ask(url, api_key)["models"]
    if as_json:
        typer.echo(json.dumps(models))
        return
    table = Table()
    for column in ("model", "state", "load", "pinned", "running", "idle, s", "unloaded after, s"):
        table.add_column(column)
    for one in models:
        after = "" if one["idle_ttl_s"] is None else f"{one['idle_ttl_s']:g}"
        pinned = "yes" if one["pinned"] else ""
        table.add_row(
            one["name"], one["state"], one["load"], pinned, str(one["running"]), f"{one['idle_s']:.0f}", after
        )
    console.out().print(table)


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
    """What the service answers.

    Raises:
        WorkerError: nobody answers, or the service refuses.
    """
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    address = url.rstrip("/").removesuffix("/v1") + _ROUTE + (f"/{action}" if action else "")
    try:
        request = Request(address, None if body is None else json.dumps(body).encode(), headers)
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise WorkerError(_message(error)) from error
    except (URLError, OSError, ValueError) as error:
        raise WorkerError(f"no service answers at {url} ({error}); give --url, or start one: paceline serve") from error


def _message(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the service answers with status {error.code}; is it paceline's?"
