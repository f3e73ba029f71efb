"""The HTTP edge as a deployment of Ray Serve. What it answers is in `paceline.serving.api`; it holds no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve

from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.api import create_app
from paceline.serving.key_counts import KeyCounts
from paceline.serving.logs import write_with_serve
from paceline.serving.managed import ManagedRouter
from paceline.serving.serve_lifecycle import RayOwner, actor_name
from paceline.serving.serve_router import RECOVERY_S, ModelRoute, ServeRouter
from paceline.serving.service import Routes, Service
from paceline.serving.settings import ApiSettings
from paceline.serving.shared_lifecycle import SharedLifecycle
from paceline.serving.taken import UntilTaken, own_name
from paceline.serving.watch import WATCHED, watch_cluster


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
        self._router, self._settings = ManagedRouter(router, lifecycle), settings

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve calls it in the replica."""
        app = create_app(self._router, self._settings, self._router.lifecycle, keys=self._keys)
        app.add_middleware(UntilTaken)
        return app
