"""Ray Serve application of a models file: one deployment for each model, and one for HTTP.

`build` is a builder for `serve deploy`:

    applications:
      - name: paceline
        route_prefix: /
        import_path: paceline.serving.ray_app:build
        args: {models: /path/models.yaml, instance: inf2.48xlarge}

`deploy_config` writes that file. A replica of a model is a replica group (`paceline.placement.planning.groups`): the
process that runs the target, and its draft if that has its own cores. Models loaded on demand are separate applications
(`paceline.serving.serve_lifecycle`).

A request through Serve's proxy costs the proxy and the ingress process more than the ingress needs to serve it directly
(docs/decisions/0019). So on the launcher's machine the ingress process accepts connections itself (`serving`), at a
socket that it gets from the launcher (`ListeningSocket`, `receive_socket`). The launcher keeps the socket open: an
address in use is an error before anything starts, and while an ingress process is replaced, connections wait and are
not rejected. The socket is passed through a file that only its owner can use (SCM_RIGHTS; Linux, unix(7)).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Lifespan

from paceline.core.errors import ConfigurationError, WorkerError
from paceline.placement import read_fault_policy, read_models
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.host import environment
from paceline.placement.planning import planner
from paceline.placement.planning.groups import ReplicaGroupPlan, plan_groups
from paceline.placement.planning.instances import instance_named
from paceline.placement.planning.model_specs import models_of
from paceline.placement.planning.yaml_file import validate
from paceline.placement.remote import channel
from paceline.serving.api import create_app
from paceline.serving.middleware import KeyCounts
from paceline.serving.ray_guard import (
    WATCHED,
    UntilTaken,
    WithServe,
    own_name,
    watch_cluster,
    write_with_serve,
)
from paceline.serving.replica import CPU_SHARE, DEPLOYED, SHUTDOWN_S, model_deployment
from paceline.serving.serve_lifecycle import ServeLifecycle, Service, actor_name
from paceline.serving.serve_router import RECOVERY_S, ServeRouter
from paceline.serving.settings import ApiSettings

_ARGUMENTS = ("models", "instance", "api")
_HERE = "node:__internal_head__"  # Ray's name for the node on which a cluster was started


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application for ``models``, a file or a list of its entries, on ``instance`` (a name; default: this
    machine). ``api``: fields of `paceline.serving.settings.ApiSettings`.

    Raises:
        ConfigurationError: an argument is unknown, missing or wrong.
        PlanError: there is no plan, or it cannot be run.
    """
    unknown = sorted(set(arguments) - set(_ARGUMENTS))
    if unknown or "models" not in arguments:
        accepted = ", ".join(arguments) or "none"
        raise ConfigurationError(f"args: expected `models`, `instance` and `api`, got {accepted}; correct them")
    models, machine = arguments["models"], instance_named(arguments.get("instance"))
    if isinstance(models, list):
        specs = models_of(models, folder=Path(), where="models")
        policy = FaultPolicy().for_models(specs)
    else:
        specs = read_models(Path(models))
        policy = read_fault_policy(Path(models), specs)
    return application(plan_groups(specs, machine), policy, validate(ApiSettings, arguments.get("api", {}), "api"))


def deploy_config(
    models: Path | Sequence[Mapping[str, object]],
    instance: str | None,
    settings: ApiSettings,
    *,
    host: str,
    port: int,
) -> dict[str, object]:
    """Return the config of `serve deploy` for a models file or its entries: the service of `paceline serve`, kept
    running.
    """
    listed: object = str(models.resolve()) if isinstance(models, Path) else [dict(entry) for entry in models]
    arguments = {"models": listed, **({} if instance is None else {"instance": instance})}
    changed = {key: value for key, value in asdict(settings).items() if value != asdict(ApiSettings())[key]}
    if changed:
        arguments["api"] = {key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()}
    application = {
        "name": "paceline",
        "route_prefix": "/",
        "import_path": f"{__name__}:{build.__name__}",
        "external_scaler_enabled": True,  # models are loaded and unloaded by the lifecycle
    }
    return {"http_options": {"host": host, "port": port}, "applications": [{**application, "args": arguments}]}


def application(
    groups: Sequence[ReplicaGroupPlan],
    fault_policy: FaultPolicy,
    settings: ApiSettings | None = None,
    *,
    handover: str = "",
) -> serve.Application:
    """Return the application for planned models.

    ``handover``: of a `ListeningSocket` in this process, which serves HTTP without Serve's
    proxy; "": Serve's proxy listens, wherever it runs.

    Raises:
        PlanError: a model cannot be run as it was planned.
    """
    for group in groups:
        planner.check(group.plan)
    handles = {group.name: model_deployment(group, fault_policy) for group in groups if not group.is_on_demand}
    ingress = serve.deployment(
        Ingress,
        name="openai",
        **DEPLOYED,
        ray_actor_options={
            "num_cpus": CPU_SHARE,
            "runtime_env": {"env_vars": environment.without_cores()},  # Ray restricts no cores of them
            **({"resources": {_HERE: CPU_SHARE}} if handover else {}),
        },
    )
    return ingress.bind(
        handles, settings or ApiSettings(), groups=tuple(groups), fault_policy=fault_policy, handover=handover
    )


@serve.ingress()
class Ingress:
    """HTTP ingress in a process of Ray Serve; its routes are in `paceline.serving.api`. It holds no model.

    handles   model -> handle of its deployment, for models that are loaded from the start
    groups    groups of all models
    handover  as of `application`
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        settings: ApiSettings,
        *,
        groups: Sequence[ReplicaGroupPlan],
        fault_policy: FaultPolicy,
        handover: str = "",
    ) -> None:
        write_with_serve()
        self._application = serve.get_replica_context().app_name
        self._settings, self._handover, self._keys = settings, handover, KeyCounts()
        watch_cluster((*WATCHED, (actor_name(self._application), NAMESPACE)))
        service = Service(self._application, {group.name: group for group in groups}, fault_policy)
        comes_and_goes = any(
            own.autoscaling is None and (own.load == "on_demand" or own.idle_ttl_s is not None)
            for own in (group.residency for group in groups)
        )
        self._lifecycle = ServeLifecycle(
            service, needed=comes_and_goes, keys=None if settings.max_requests_per_key is None else self._keys
        )
        self._router = ServeRouter(
            {name: handles[name] if name in handles else service.handle(name) for name in service.groups},
            lifecycle=self._lifecycle,
            resume_s=max(RECOVERY_S, fault_policy.startup_timeout_s),
            reader=own_name(),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the ASGI application; Ray Serve calls this in the replica."""
        app = create_app(self._router, self._settings, self._lifecycle, keys=self._keys)
        if self._handover:
            app.router.lifespan_context = self._listening(app, app.router.lifespan_context)
        else:
            app.add_middleware(UntilTaken)
        return app

    def _listening(self, app: FastAPI, lifespan: Lifespan[FastAPI]) -> Lifespan[FastAPI]:
        """Return the application's lifespan, during which it listens at the service's address."""

        listening = receive_socket(self._handover)

        @asynccontextmanager
        async def both(_: FastAPI) -> AsyncIterator[None]:
            async with lifespan(app), serving(WithServe(app, self._application), listening, drain_s=SHUTDOWN_S):
                yield

        return both


_BACKLOG = 2048  # connections that wait to be accepted; uvicorn's default
_KEEP_ALIVE_S = 60.0  # for an idle connection: longer than clients keep theirs, which else find it closed
_RECEIVE_S = 10.0


class ListeningSocket(AbstractContextManager["ListeningSocket"]):
    """Address of a service, and a socket file (``handover``) at which processes of this user get the socket.
    Connections wait until a process that received the socket listens.

    Raises:
        ConfigurationError: the address is not available.
        WorkerError: another user can change the folder of socket files.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = _bound(host, port)
        self.handover = str(environment.scratch() / "sockets" / f"http-{secrets.token_hex(4)}")
        try:
            self._gives = channel.listen(channel.Address(path=self.handover))
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._give, name="paceline-http-socket", daemon=True).start()

    @property
    def port(self) -> int:
        """Port of the socket: the requested one, or with 0 a free one."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Close the socket. Connections are rejected once every process that received it has closed it, too."""
        with suppress(OSError):  # it is closed already
            self._gives.shutdown(socket.SHUT_RDWR)  # its thread ends
        self._gives.close()
        Path(self.handover).unlink(missing_ok=True)
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._gives.accept()
                with connection, suppress(OSError):  # of a process that has ended
                    socket.send_fds(connection, [b"\0"], [self._socket.fileno()])


def receive_socket(handover: str) -> socket.socket:
    """Receive the socket of `ListeningSocket`, in a process of the same user on the same machine."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_RECEIVE_S)
            connection.connect(handover)
            _, (number,), _, _ = socket.recv_fds(connection, 1, 1)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"the process that started the service did not report its address ({error}); start the service again"
        ) from error
    return socket.socket(fileno=number)


@asynccontextmanager
async def serving(app: ASGIApp, listening: socket.socket, *, drain_s: float) -> AsyncIterator[None]:
    """Serve connections to ``listening`` with ``app`` during the block. Then no more are accepted, and current
    responses have ``drain_s`` seconds to end. The caller runs ``app``'s lifespan. Raises OSError if another socket
    listens at the address: two services that start at the same moment both have it.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level=None,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(_KEEP_ALIVE_S),
        timeout_graceful_shutdown=round(drain_s),
    )
    server = _Server(config)
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if running.done():
        listening.close()
        await running
    try:
        yield
    finally:
        server.should_exit = True
        await running


class _Server(uvicorn.Server):
    """Server that leaves signals to its process."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigurationError(
            f"--port: cannot listen on {host}:{port} ({error}); choose another --host or --port, or stop the "
            "process that uses it"
        ) from error
    return listening
