"""A `Loader` over Ray Serve: an unloaded model has no replica, so its cores and its memory are free.

A model that is loaded from the start is a deployment of the service's application, and one without replicas when it is
unloaded. A model that is loaded on demand is an application of its own, since Serve deploys none without replicas.
Errors have no text of Ray's, since clients read them; the log has it. Not here: when it is done
(`paceline.serving.lifecycle`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from paceline.core.errors import WorkerError
from paceline.placement.cluster.core_allocator import call_allocator
from paceline.placement.cluster.reservation import RESOURCE
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.room import Resident, to_unload
from paceline.serving import serve_controller, serve_decisions
from paceline.serving.decisions import Decisions
from paceline.serving.deployments import deployment_name, model_deployment
from paceline.serving.router import ModelCard
from paceline.serving.serve_controller import DeploymentState
from paceline.serving.serve_router import ServeRouter
from paceline.serving.service import Service

log = logging.getLogger("paceline")

_LOOK_S = 0.2  # between looks at what became of it
_ANSWER_S = 30.0  # that the core allocator may take
_RAY_ERRORS = (OSError, RuntimeError, ValueError, RayError, RayServeException)  # what Ray and Serve raise
_STUCK = ("UNHEALTHY", "DEPLOY_FAILED")


class ServeLoader:
    """See the module.

    router  tells which replicas answer, and on which cores; models on demand are put into it when they are loaded
    """

    def __init__(self, service: Service, router: ServeRouter) -> None:
        self._service, self._router = service, router
        self._application, self._groups, self._policy = service.application, service.groups, service.fault_policy

    async def load(self, name: str) -> None:
        """See `Loader`."""
        group = self._groups[name]
        try:
            if group.is_on_demand:
                app = model_deployment(group, self._policy)
                await asyncio.to_thread(serve.run, app, name=self._service.own_application(name), route_prefix=None)
                self._router.put(name, self._service.route(name))
            else:
                await self._scale(name, group.replicas)
            await self._until_it_answers(name)
        except BaseException as error:
            with suppress(*_RAY_ERRORS, WorkerError):
                await self.unload(name)
            if isinstance(error, _RAY_ERRORS):
                log.warning("%s does not start", name, exc_info=error)
                raise WorkerError(f"{name} does not start; the log of its replica says why") from error
            raise

    async def unload(self, name: str) -> None:
        """See `Loader`."""
        if self._groups[name].is_on_demand:
            self._router.remove(name)
            await asyncio.to_thread(serve.delete, self._service.own_application(name))
            return
        await self._scale(name, 0)
        while (await self._deployments())[name].replicas:
            await asyncio.sleep(_LOOK_S)
        self._router.forget(name)

    async def loaded(self) -> Sequence[str]:
        """See `Loader`."""
        loaded = [name for name, one in (await self._deployments()).items() if one.target]
        applications = (await asyncio.to_thread(serve.status)).applications
        on_demand = [
            name
            for name, group in self._groups.items()
            if group.is_on_demand and self._service.own_application(name) in applications
        ]
        for name in on_demand:
            self._router.put(name, self._service.route(name))
        return [*loaded, *on_demand]

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        """See `Loader`. Whatever else has cores in the cluster stays."""
        group = self._groups[name]
        residents = [Resident(other, _cores(await self._router.cards(other)), movable=True) for other in movable]
        return await asyncio.to_thread(_room, group, [one for one in residents if one.cores])

    async def remember(self, kept: Decisions) -> None:
        """See `Loader`."""
        await serve_decisions.write(self._application, kept)

    async def remembered(self) -> Decisions:
        """See `Loader`."""
        return await serve_decisions.read(self._application)

    async def _until_it_answers(self, name: str) -> None:
        end = monotonic() + self._policy.startup_timeout_s
        while not await self._router.cards(name, fresh=True):
            states = await self._deployments()
            if name in states and states[name].status in _STUCK:
                raise WorkerError(f"{name} does not start; the log of its replica says why")
            if monotonic() > end:
                raise WorkerError(f"{name} did not start within {self._policy.startup_timeout_s} seconds")
            await asyncio.sleep(_LOOK_S)

    async def _scale(self, name: str, replicas: int) -> None:
        try:
            await serve_controller.scale(self._application, deployment_name(name), replicas)
        except (RayError, ValueError) as error:
            log.warning("Ray Serve did not take the number of replicas of %s", name, exc_info=error)
            raise WorkerError(f"Ray Serve did not take the number of replicas of {name}; the log says why") from error

    async def _deployments(self) -> Mapping[str, DeploymentState]:
        """What Serve knows of each model."""
        try:
            deployments = await serve_controller.deployments(self._application)
        except (RayError, ValueError) as error:
            raise WorkerError(f"Ray Serve's controller does not answer ({type(error).__name__})") from error
        return {name: deployments[key] for name in self._groups if (key := deployment_name(name)) in deployments}


def _room(group: ReplicaGroupPlan, movable: Sequence[Resident]) -> Sequence[str]:
    stay: dict[str, list[CoreRange]] = {}
    for node, taken in call_allocator("taken", timeout=_ANSWER_S).items():
        leave = [run for one in movable for run in one.cores.get(node, ())]
        stay[node] = [run for run in taken.values() if run not in leave]
    return to_unload(group, [*movable, Resident("others", stay)], _nodes(group.plan.instance))


def _cores(cards: Sequence[ModelCard]) -> dict[str, list[CoreRange]]:
    """What all replicas of a model have, by node."""
    cores: dict[str, list[CoreRange]] = {}
    for placed in (placed for card in cards for placed in card.placement):
        cores.setdefault(placed.node, []).append(CoreRange(placed.cores[0], placed.cores[-1]))
    return cores


def _nodes(instance: Instance) -> dict[str, Instance]:
    """The living nodes with cores. One with more or fewer than the plan's instance is such an instance of its size."""
    nodes = {}
    for node in ray.nodes():
        cores = int(node["Resources"].get(RESOURCE, 0)) if node["Alive"] else 0
        if cores:
            devices = max(1, cores // instance.cores_per_device)
            nodes[str(node["NodeID"])] = replace(instance, devices=devices)
    return nodes
