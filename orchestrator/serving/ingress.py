"""The HTTP edge as a deployment of Ray Serve. What it answers is in `paceline.serving.api`; it holds no model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.context import _RequestContext, _serve_request_context  # what Serve's proxy sets; it has no public name
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.api import create_app
from paceline.serving.deployments import SHUTDOWN_S, Routes, Service
from paceline.serving.listener import receive_socket, serving
from paceline.serving.logs import write_with_serve
from paceline.serving.middleware import KeyCounts, identify
from paceline.serving.ray_guard import WATCHED, UntilTaken, own_name, watch_cluster
from paceline.serving.serve_lifecycle import ManagedRouter, RayOwner, SharedLifecycle, actor_name
from paceline.serving.serve_router import RECOVERY_S, ModelRoute, ServeRouter
from paceline.serving.settings import ApiSettings


@serve.ingress()
class Ingress:
    """What answers HTTP, in a process of Ray Serve.

    handles   model -> handle of its deployment, of those that are loaded from the start
    groups    of all models
    handover  where this process gets a socket to listen at (`paceline.serving.listener`); "": Serve's proxy listens,
              and passes requests on
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
        application = serve.get_replica_context().app_name
        watch_cluster((*WATCHED, (actor_name(application), NAMESPACE)))
        routes = {model: ModelRoute(handle) for model, handle in handles.items()}
        resume_s = max(RECOVERY_S, fault_policy.startup_timeout_s)
        router = ServeRouter(routes, resume_s=resume_s, reader=own_name())
        service = Service(application, {group.name: group for group in groups}, fault_policy)
        residencies = {group.name: group.residency for group in groups}
        comes_and_goes = any(
            own.autoscaling is None and (own.load == "on_demand" or own.idle_ttl_s is not None)
            for own in residencies.values()
        )
        owner = RayOwner(service, needed=comes_and_goes or settings.max_requests_per_key is not None)
        self._keys, routing = KeyCounts(), Routes(service, router)
        lifecycle = SharedLifecycle(owner, residencies, follow=routing.follow, keys=self._keys)
        self._application = application
        self._router, self._settings, self._handover = ManagedRouter(router, lifecycle), settings, handover

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve calls it in the replica."""
        app = create_app(self._router, self._settings, self._router.lifecycle, keys=self._keys)
        if self._handover:
            app.router.lifespan_context = self._listening(app, app.router.lifespan_context)
        else:
            app.add_middleware(UntilTaken)
        return app

    def _listening(self, app: FastAPI, lifespan: Lifespan[FastAPI]) -> Lifespan[FastAPI]:
        """The application's lifespan, in which it answers at the service's address."""

        listening = receive_socket(self._handover)

        @asynccontextmanager
        async def both(_: FastAPI) -> AsyncIterator[None]:
            async with lifespan(app), serving(WithServe(app, self._application), listening, drain_s=SHUTDOWN_S):
                yield

        return both


class WithServe:
    """ASGI: tells Serve which request a call belongs to, so that what any process logs of it has its id."""

    def __init__(self, app: ASGIApp, application: str) -> None:
        self._app, self._application = app, application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            context = _RequestContext(scope["path"], request_id=identify(scope), app_name=self._application)
            _serve_request_context.set(context)
        await self._app(scope, receive, send)
