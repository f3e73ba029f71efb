"""Lifecycle of a service's models: loaded by the operator or on demand, unloaded when idle or for another model.

`ModelLifecycle` decides; a `ModelLoader` starts and ends models, and polls their usage. One lifecycle has all models of
a service, and is used from one event loop. Ingress processes call it through `paceline.serving.serve_lifecycle` if a
model does not respond. The planner decides what fits (`paceline.placement.planning.groups`), called by the loader. No
HTTP, no Ray. Docs: decision 0021.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

from paceline.core.errors import PacelineError, RoomError
from paceline.placement.planning.residency import Residency
from paceline.serving.errors import UNAVAILABLE, RefusedError, model_not_found

State = Literal["loaded", "loading", "unloading", "unloaded", "scaled"]
"""Model state. ``scaled``: Ray Serve loads and unloads it, by its load."""


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """Current requests of a model's replicas, and seconds since the last one ended or the replicas were started."""

    running: int = 0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelState:
    """State of a model for an operator.

    awaited  whether a replica should respond now
    idle_s   seconds since its last request ended, or since it was loaded; 0 if it is not loaded
    """

    name: str
    state: State
    load: str
    pinned: bool
    awaited: bool
    running: int
    idle_s: float
    idle_ttl_s: float | None

    @classmethod
    def of(
        cls,
        name: str,
        residency: Residency,
        state: State | None = None,
        *,
        pinned: bool,
        usage: ModelUsage | None = None,
    ) -> ModelState:
        """Create the state of a model. ``state``: None: the one at the start of its service."""
        scaling, usage = residency.autoscaling, usage or ModelUsage()
        state = state or first_state(residency)
        awaited = state == "loaded" if scaling is None else scaling.min_replicas > 0
        return cls(name, state, residency.load, pinned, awaited, usage.running, usage.idle_s, residency.idle_ttl_s)

    def to_dict(self) -> dict[str, object]:
        fields = asdict(self) | {"idle_s": round(self.idle_s, 1)}
        del fields["awaited"]
        return fields


class Lifecycle(Protocol):
    """A service's lifecycle in an ingress process. `load`, `unload` and `pin` raise RefusedError: 404, no such model;
    409, Ray Serve manages it, or it is pinned and to be unloaded; `load` also as `demand`.
    """

    async def states(self) -> Sequence[ModelState]: ...

    async def demand(self, name: str) -> None:
        """Load a model for a waiting request if its residency allows that; none of its replicas responds.

        Raises:
            RefusedError: 503, it is unloaded and stays so, it does not start, or models that must stay use its cores.
            PacelineError: no lifecycle is available now.
        """

    async def load(self, name: str) -> ModelState: ...

    async def unload(self, name: str) -> ModelState:
        """Unload a model after its current requests. New ones are rejected until it is loaded again, or load it if the
        models file says ``load: on_demand``.
        """

    async def pin(self, name: str, pinned: bool) -> ModelState: ...

    async def restore(self) -> None:
        """Read which models are loaded, and the decisions of an earlier run. Raises PacelineError if that is
        impossible.
        """

    async def watch(self) -> None: ...


def first_state(residency: Residency) -> State:
    if residency.autoscaling is not None:
        return "scaled"
    return "loaded" if residency.load == "eager" else "unloaded"


@dataclass(frozen=True, slots=True)
class Decisions:
    """Models, by name, that an operator has changed while a service runs.

    pinned    stay in memory
    unpinned  may be unloaded, though the file pins them
    stopped   are unloaded, and no request loads them
    """

    pinned: Sequence[str] = ()
    unpinned: Sequence[str] = ()
    stopped: Sequence[str] = ()


log = logging.getLogger("paceline")

_RETRY_S = 30.0  # after which a model that an operator unloaded may be loaded again
_BUSY_RETRY_S = 10.0  # after which a model that uses the cores may be idle
_LOOKS = 8  # checks of idle models in the shortest time to live


class ModelLoader(Protocol):
    """Starts and ends models, and keeps an operator's decisions. Every method may raise PacelineError."""

    async def load(self, name: str) -> None:
        """Load a model; return when it responds. If it does not start, its processes have ended."""

    async def unload(self, name: str) -> None:
        """Unload a model; return when its requests are completed and its cores are free."""

    async def loaded(self) -> Sequence[str]: ...

    async def usage(self, name: str) -> ModelUsage | None:
        """Return the usage of a loaded model; None if its replicas do not respond."""

    async def leave(self, name: str, *, unless_used: bool) -> bool:
        """Make its replicas reject new requests before it is unloaded. With ``unless_used``: return False and change
        nothing if one of them has requests or does not respond.
        """

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        """Return which of the ``movable`` models, the first ones first, to unload for this one. Raises RoomError if it
        does not fit, even without all of them.
        """

    async def remember(self, decisions: Decisions) -> None:
        """Store decisions in place of earlier ones, so that they outlive this process."""

    async def remembered(self) -> Decisions: ...


@dataclass(slots=True)
class _Kept:
    """State of one model. ``stopped``: an operator unloaded it, and no request loads it again."""

    residency: Residency
    state: State
    pinned: bool
    stopped: bool = False
    loading: asyncio.Task[None] | None = None


class ModelLifecycle:
    """Lifecycle of a service's models, a `Lifecycle`. ``residencies``: of every model of the service, by name."""

    def __init__(self, loader: ModelLoader, residencies: Mapping[str, Residency]) -> None:
        self._loader = loader
        self._models = {name: _Kept(own, first_state(own), own.pinned) for name, own in residencies.items()}
        self._changing = asyncio.Lock()  # one model at a time is loaded or unloaded

    async def states(self) -> Sequence[ModelState]:
        used = await self._usage(*(name for name, one in self._models.items() if one.state == "loaded"))
        return [
            ModelState.of(name, one.residency, one.state, pinned=one.pinned, usage=used.get(name))
            for name, one in self._models.items()
        ]

    async def demand(self, name: str) -> None:
        model = self._model(name)
        if model.state in ("loaded", "scaled"):
            return
        if model.stopped:
            message = f"{name} is unloaded; an operator has to load it (paceline models load {name})"
            raise RefusedError(503, message, code=UNAVAILABLE, retry_after_s=_RETRY_S)
        await self._load(name, model)

    async def load(self, name: str) -> ModelState:
        model = self._managed(name)
        await self._decide(model, pinned=model.pinned, stopped=False)
        await self._load(name, model)
        return self._state(name, model)

    async def unload(self, name: str) -> ModelState:
        model = self._managed(name)
        if model.pinned:
            raise RefusedError(409, f"{name} is pinned; unpin it first", param="model", code="model_pinned")
        await self._decide(model, pinned=False, stopped=model.residency.load == "eager")
        async with self._changing:
            await self._unload(name, unless_used=False)
        return self._state(name, model)

    async def pin(self, name: str, pinned: bool) -> ModelState:
        model = self._managed(name)
        await self._decide(model, pinned=pinned, stopped=model.stopped)
        return self._state(name, model)

    async def restore(self) -> None:
        known = await self._loader.remembered()
        loaded = await self._loader.loaded()
        for name, model in self._models.items():
            if model.state != "scaled":
                model.state = "loaded" if name in loaded else "unloaded"
                model.pinned = name in known.pinned or (model.residency.pinned and name not in known.unpinned)
                model.stopped = name in known.stopped and model.state == "unloaded"

    async def watch(self) -> None:
        limits = [one.residency.idle_ttl_s for one in self._models.values() if _limit(one) is not None]
        while limits:
            await asyncio.sleep(min(limit for limit in limits if limit is not None) / _LOOKS)
            try:
                await self.unload_idle()
            except Exception as error:  # the next check may succeed
                log.warning("unloading idle models failed (%s: %s)", type(error).__name__, error)

    async def unload_idle(self) -> None:
        for name, model in self._models.items():
            limit = _limit(model)
            if limit is None:
                continue
            async with self._changing:
                idle_s = (await self._movable(name)).get(name, 0.0)
                if idle_s > limit and await self._unload(name, unless_used=True):
                    log.info("%s was unloaded after %.0f s without a request", name, idle_s)

    async def _decide(self, model: _Kept, *, pinned: bool, stopped: bool) -> None:
        """Apply and store an operator's decision. It has no effect if it cannot be stored (RefusedError, 503)."""
        before = model.pinned, model.stopped
        if before == (pinned, stopped):
            return
        model.pinned, model.stopped = pinned, stopped
        models = self._models.items()
        try:
            await self._loader.remember(
                Decisions(
                    pinned=[name for name, one in models if one.pinned and not one.residency.pinned],
                    unpinned=[name for name, one in models if one.residency.pinned and not one.pinned],
                    stopped=[name for name, one in models if one.stopped],
                )
            )
        except PacelineError as error:
            model.pinned, model.stopped = before
            raise RefusedError(503, str(error), code=UNAVAILABLE, retry_after_s=_RETRY_S) from error

    # ---- one at a time

    async def _load(self, name: str, model: _Kept) -> None:
        """Load a model; concurrent requests for it wait for the same attempt."""
        if model.loading is None:
            model.loading = asyncio.ensure_future(self._attempt(name, model))
        try:
            await asyncio.shield(model.loading)
        except RoomError as error:
            raise RefusedError(503, str(error), code=UNAVAILABLE, retry_after_s=_BUSY_RETRY_S) from error
        except PacelineError as error:
            raise RefusedError(503, str(error), code=UNAVAILABLE, retry_after_s=_RETRY_S) from error

    async def _attempt(self, name: str, model: _Kept) -> None:
        try:
            async with self._changing:
                if model.state == "loaded":
                    return
                await self._make_room(name)
                model.state = "loading"
                try:
                    await self._loader.load(name)
                except BaseException:
                    model.state = "unloaded"
                    raise
                model.state = "loaded"
        finally:
            model.loading = None

    async def _make_room(self, name: str) -> None:
        while True:
            idle = await self._movable(*self._models)
            leave = await self._loader.to_unload(name, sorted(idle, key=lambda other: -idle[other]))
            for other in leave:
                if not await self._unload(other, unless_used=True):
                    break  # a request arrived in between: check again
                log.info("%s was evicted to load %s", other, name)
            else:
                return

    async def _movable(self, *names: str) -> dict[str, float]:
        """Return the models of ``names`` that may be unloaded, and the seconds since their last request."""
        kept = ((name, self._models[name]) for name in names)
        used = await self._usage(*(name for name, one in kept if one.state == "loaded" and not one.pinned))
        return {name: one.idle_s for name, one in used.items() if not one.running}

    async def _usage(self, *names: str) -> dict[str, ModelUsage]:
        """Return the usage of models that respond. That of others is unknown, so they stay loaded."""
        found = await asyncio.gather(*(self._loader.usage(name) for name in names))
        return {name: usage for name, usage in zip(names, found, strict=True) if usage is not None}

    async def _unload(self, name: str, *, unless_used: bool) -> bool:
        """Unload a model. False: it is in use after all."""
        model = self._models[name]
        after: State = "loaded"
        if model.state != "loaded":
            return True
        model.state = "unloading"
        try:
            if not await self._loader.leave(name, unless_used=unless_used):
                return False
            after = "unloaded"
            await self._loader.unload(name)
            return True
        finally:
            model.state = after

    def _model(self, name: str) -> _Kept:
        if name not in self._models:
            raise model_not_found(name, list(self._models))
        return self._models[name]

    def _managed(self, name: str) -> _Kept:
        model = self._model(name)
        if model.state == "scaled":
            message = f"{name} is loaded and unloaded by Ray Serve (autoscaling); change its bounds instead"
            raise RefusedError(409, message, param="model", code="model_autoscaled")
        return model

    def _state(self, name: str, model: _Kept) -> ModelState:
        return ModelState.of(name, model.residency, model.state, pinned=model.pinned)


def _limit(model: _Kept) -> float | None:
    """Idle seconds after which a model is unloaded; None if Ray Serve scales it, with its own limit."""
    return None if model.state == "scaled" else model.residency.idle_ttl_s
