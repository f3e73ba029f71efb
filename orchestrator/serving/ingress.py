"""The HTTP edge as a deployment of Ray Serve. What it answers is in `paceline.serving.api`; it holds no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve

from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.api import create_app
from paceline.serving.lifecycle import ModelLifecycle
from paceline.serving.logs import write_with_serve
from paceline.serving.managed import ManagedRouter
from paceline.serving.serve_loader import ServeLoader
from paceline.serving.serve_router import RECOVERY_S, ModelRoute, ServeRouter
from paceline.serving.settings import ApiSettings
from paceline.serving.watch import watch_cluster


@serve.ingress()
class Ingress:
    """``handles``: model -> handle of its deployment, of those that are loaded from the start. ``groups``: of all."""

    def __init__(
        self,
        handles: Mapping[str, Any],
        settings: ApiSettings,
        *,
        groups: Sequence[ReplicaGroupPlan],
        fault_policy: FaultPolicy,
    ) -> None:
        write_with_serve()
        watch_cluster()
        routes = {model: ModelRoute(handle) for model, handle in handles.items()}
        router = ServeRouter(routes, resume_s=max(RECOVERY_S, fault_policy.startup_timeout_s))
        application = serve.get_replica_context().app_name
        planned = {group.name: group for group in groups}
        loader = ServeLoader(application, planned, router, fault_policy=fault_policy)
        lifecycle = ModelLifecycle(loader, {group.name: group.residency for group in groups})
        self._router, self._settings = ManagedRouter(router, lifecycle), settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve calls it in the replica."""
        return create_app(self._router, self._settings, self._router.lifecycle)
