"""A `Loader` over Ray Serve: an unloaded model is a deployment without replicas, whose cores and memory are free.

Not here: when that is done (`paceline.serving.lifecycle`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic

import ray
from ray.exceptions import RayError
from ray.serve.schema import DeploymentDetails

from paceline.core.errors import WorkerError
from paceline.placement.cluster.core_allocator import call_allocator
from paceline.placement.cluster.reservation import RESOURCE
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.room import Resident, to_unload
from paceline.serving import serve_controller
from paceline.serving.router import ModelCard
from paceline.serving.serve_router import ServeRouter

_LOOK_S = 0.2  # between looks at what became of it
_ANSWER_S = 30.0  # that the core allocator may take
_STUCK = ("UNHEALTHY", "DEPLOY_FAILED")


def deployment_name(model: str) -> str:
    """Of a model's deployment in its application."""
    return f"model-{model}"


class ServeLoader:
    """See the module.

    application  the name of the one that serves the models
    groups       of all of them
    router       tells which replicas answer, and on which cores
    """

    def __init__(
        self, application: str, groups: Mapping[str, ReplicaGroupPlan], router: ServeRouter, *, startup_timeout_s: float
    ) -> None:
        self._application, self._groups, self._router = application, dict(groups), router
        self._startup_s = startup_timeout_s

    async def load(self, name: str) -> None:
        """See `Loader`."""
        await self._scale(name, self._groups[name].replicas)
        end = monotonic() + self._startup_s
        try:
            while not await self._router.cards(name, fresh=True):
                details = (await self._details())[name]
                if details.status.value in _STUCK:
                    raise WorkerError(f"{name} does not start; the log of its replica says why")
                if monotonic() > end:
                    raise WorkerError(f"{name} did not start within {self._startup_s} seconds")
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            await self._scale(name, 0)
            raise

    async def unload(self, name: str) -> None:
        """See `Loader`."""
        await self._scale(name, 0)
        while (await self._details())[name].replicas:
            await asyncio.sleep(_LOOK_S)
        self._router.forget(name)

    async def loaded(self) -> Sequence[str]:
        """See `Loader`."""
        details = await self._details()
        return [name for name in self._groups if name in details and details[name].target_num_replicas]

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        """See `Loader`. Whatever else has cores in the cluster stays."""
        wanted = self._groups[name]
        residents = [Resident(other, _cores(await self._router.cards(other)), movable=True) for other in movable]
        return await asyncio.to_thread(_room, wanted, [one for one in residents if one.cores])

    async def _scale(self, name: str, replicas: int) -> None:
        try:
            await serve_controller.scale(self._application, deployment_name(name), replicas)
        except (RayError, ValueError) as error:
            raise WorkerError(f"Ray Serve did not take the number of replicas of {name}: {error}") from error

    async def _details(self) -> Mapping[str, DeploymentDetails]:
        """What Serve knows of each model."""
        try:
            found = await serve_controller.details()
        except (RayError, ValueError) as error:
            raise WorkerError(f"Ray Serve's controller does not answer ({type(error).__name__})") from error
        deployments = found.applications[self._application].deployments
        return {name: deployments[key] for name in self._groups if (key := deployment_name(name)) in deployments}


def _room(wanted: ReplicaGroupPlan, movable: Sequence[Resident]) -> Sequence[str]:
    stay: dict[str, list[CoreRange]] = {}
    for node, taken in call_allocator("taken", timeout=_ANSWER_S).items():
        leave = [run for one in movable for run in one.cores.get(node, ())]
        stay[node] = [run for run in taken.values() if run not in leave]
    return to_unload(wanted, [*movable, Resident("others", stay)], _nodes(wanted.plan.instance))


def _cores(cards: Sequence[ModelCard]) -> dict[str, list[CoreRange]]:
    """What all replicas of a model have, by node."""
    found: dict[str, list[CoreRange]] = {}
    for placed in (placed for card in cards for placed in card.placement):
        found.setdefault(placed.node, []).append(CoreRange(placed.cores[0], placed.cores[-1]))
    return found


def _nodes(instance: Instance) -> dict[str, Instance]:
    """The living nodes with cores. One with more or fewer than the plan's instance is such an instance of its size."""
    found = {}
    for node in ray.nodes():
        cores = int(node["Resources"].get(RESOURCE, 0)) if node["Alive"] else 0
        if cores:
            devices = max(1, cores // instance.cores_per_device)
            found[str(node["NodeID"])] = replace(instance, devices=devices)
    return found
