"""The `Owner` of a service's lifecycle over Ray: one named actor, however many processes answer HTTP.

There is none before somebody has something to decide: a model on demand, a time to live, a limit of API keys, or an
operator. It belongs to the HTTP process that made it and ends with that; the next to ask makes another, which finds
what is loaded at Ray Serve and what was decided in Ray's key-value store. So nothing is left when a service ends. Not
here: what is decided (`paceline.serving.lifecycle`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from paceline.core.errors import WorkerError
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.host import environment
from paceline.serving import serve_decisions
from paceline.serving.lifecycle import ModelLifecycle
from paceline.serving.model_state import ModelState, Report, View
from paceline.serving.refused import UNAVAILABLE, RefusedError
from paceline.serving.serve_loader import ServeLoader
from paceline.serving.serve_router import ServeRouter
from paceline.serving.service import Service

log = logging.getLogger("paceline")

_ANSWER_S = 5.0  # that an answer about what is known may take; what loads a model takes its time
_FIRST_S = 60.0  # that the first one may take, for which a process may have to start: nothing is known before it
_TRIES, _PAUSE_S = 40, 0.25  # with an actor that is started again
_RETRY_S = 5.0
_ERRORS = (RayError, RuntimeError, ValueError, TimeoutError)


def actor_name(application: str) -> str:
    """Of the actor, in `paceline.placement.cluster.nodes.NAMESPACE`."""
    return f"paceline-lifecycle-{application}"


class LifecycleActor:
    """A `ModelLifecycle` for the processes of HTTP. Its methods are those of `Owner`."""

    def __init__(self, service: Service) -> None:
        eager = [name for name, group in service.groups.items() if not group.is_on_demand]
        router = ServeRouter({name: service.route(name) for name in eager})
        loader = ServeLoader(service, router)
        residencies = {name: group.residency for name, group in service.groups.items()}
        self._lifecycle = ModelLifecycle(loader, residencies, shared=True)
        self._starting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def exchange(self, process: str, report: Report) -> View:
        """See `ModelLifecycle.reported`."""
        return (await self._restored()).reported(process, report)

    async def demand(self, name: str) -> None:
        """See `ModelLifecycle`."""
        await (await self._restored()).demand(name)

    async def load(self, name: str) -> ModelState:
        """See `ModelLifecycle`."""
        return await (await self._restored()).load(name)

    async def unload(self, name: str) -> ModelState:
        """See `ModelLifecycle`."""
        return await (await self._restored()).unload(name)

    async def pin(self, name: str, pinned: bool) -> ModelState:
        """See `ModelLifecycle`."""
        return await (await self._restored()).pin(name, pinned=pinned)

    async def _restored(self) -> ModelLifecycle:
        async with self._starting:
            if self._watching is None:
                await self._lifecycle.restore()
                self._watching = asyncio.ensure_future(self._lifecycle.watch())
        return self._lifecycle


class RayOwner:
    """See the module. ``needed``: there is something to decide from the start."""

    def __init__(self, service: Service, *, needed: bool) -> None:
        self._service, self._needed = service, needed
        self._actor: Any = None
        self._looked = self._told = False
        self._making = asyncio.Lock()

    async def exchange(self, process: str, report: Report) -> View | None:
        """See `Owner`."""
        view: View | None = await self._call("exchange", process, report, seconds=_ANSWER_S if self._told else _FIRST_S)
        self._told = True
        return view

    async def demand(self, name: str) -> None:
        """See `Owner`."""
        await self._ask("demand", name)

    async def load(self, name: str) -> ModelState:
        """See `Owner`."""
        return await self._ask("load", name)  # type: ignore[no-any-return]

    async def unload(self, name: str) -> ModelState:
        """See `Owner`."""
        return await self._ask("unload", name)  # type: ignore[no-any-return]

    async def pin(self, name: str, pinned: bool) -> ModelState:
        """See `Owner`."""
        return await self._ask("pin", name, pinned)  # type: ignore[no-any-return]

    async def _ask(self, method: str, *arguments: object) -> Any:
        """Raises RefusedError: it refuses, or there is none."""
        self._needed = True
        try:
            return await self._call(method, *arguments, seconds=None)
        except WorkerError as error:
            raise RefusedError(
                503, f"{error}; send the request again", code=UNAVAILABLE, retry_after_s=_RETRY_S
            ) from error

    async def _call(self, method: str, *arguments: object, seconds: float | None) -> Any:
        """What it answers, or None where there is none and none is needed. One that is lost is made anew and asked
        again: all that is asked may be repeated.

        Raises:
            RefusedError: it refuses.
            WorkerError: there is none, or it does not answer within ``seconds``.
        """
        lost: Exception | None = None
        for _ in range(_TRIES):
            try:
                actor = await self._find()
                if actor is None:
                    return None
                return await asyncio.wait_for(getattr(actor, method).remote(*arguments), seconds)
            except ActorUnavailableError as error:  # Ray starts it again, and ends it where nobody keeps its handle
                lost = error
                await asyncio.sleep(_PAUSE_S)
            except RayActorError as error:
                self._actor, lost = None, error
                await asyncio.sleep(_PAUSE_S)
            except _ERRORS as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, RefusedError):
                    raise error.cause from error
                lost = error
                break
        log.warning("the actor of the lifecycle did not answer %s", method, exc_info=lost)
        raise WorkerError("the process that loads and unloads models does not answer") from lost

    async def _find(self) -> Any:
        """The actor, which is made where it is needed; None where it is not and there is none."""
        if self._actor is None:
            async with self._making:
                if self._actor is None:
                    if not self._looked:  # an operator may have decided something before this process began
                        decided = await serve_decisions.read(self._service.application)
                        self._needed |= any((decided.pinned, decided.unpinned, decided.stopped))
                        self._looked = True
                    self._actor = await asyncio.to_thread(self._make if self._needed else self._existing)
                    self._needed |= self._actor is not None
        return self._actor

    def _make(self) -> Any:
        actor = ray.remote(LifecycleActor).options(
            name=actor_name(self._service.application), namespace=NAMESPACE, get_if_exists=True, num_cpus=0,
            max_restarts=-1, scheduling_strategy="DEFAULT", runtime_env={"env_vars": environment.without_cores()},
        )  # fmt: skip
        return actor.remote(self._service)

    def _existing(self) -> Any:
        try:
            return ray.get_actor(actor_name(self._service.application), namespace=NAMESPACE)
        except ValueError:
            return None
