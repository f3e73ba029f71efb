"""The models of one application of Ray Serve, and the routes to those that are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ray import serve

from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.deployments import deployment_name
from paceline.serving.serve_router import ModelRoute, ServeRouter


@dataclass(frozen=True, slots=True)
class Service:
    """What a process has to know of it. ``application``: its name. ``groups``: of all models, by name."""

    application: str
    groups: Mapping[str, ReplicaGroupPlan]
    fault_policy: FaultPolicy

    def own_application(self, name: str) -> str:
        """That of a model which is loaded on demand."""
        return f"{self.application}-{name}"

    def route(self, name: str) -> ModelRoute:
        """To a model that is deployed."""
        own = self.own_application(name) if self.groups[name].is_on_demand else self.application
        return ModelRoute(serve.get_deployment_handle(deployment_name(name), own))


class Routes:
    """Keeps a router's routes as the owner says: to models on demand while they are loaded."""

    def __init__(self, service: Service, router: ServeRouter) -> None:
        self._service, self._router = service, router
        self._loaded: Collection[str] | None = None

    def follow(self, loaded: Collection[str]) -> None:
        """These are loaded now."""
        for name, group in self._service.groups.items():
            before = self._loaded is not None and name in self._loaded
            if before != (name in loaded):
                if not group.is_on_demand:
                    self._router.forget(name)
                elif before:
                    self._router.remove(name)
                else:
                    self._router.put(name, self._service.route(name))
        self._loaded = frozenset(loaded)
