"""Which models of a service are in memory: loaded by the operator or on demand, unloaded when idle or to make room.

`ModelLifecycle` decides; a `Loader` does it. One lifecycle has all models of a service, and is used from one event
loop. What fits is the planner's answer (`paceline.placement.planning.room`), which the loader asks for. Not here: HTTP
and Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, Protocol

from paceline.core.errors import PacelineError, RoomError
from paceline.placement.planning.residency import Residency
from paceline.serving.decisions import Decisions
from paceline.serving.refused import UNAVAILABLE, RefusedError, model_not_found

log = logging.getLogger("paceline")

State = Literal["loaded", "loading", "unloading", "unloaded", "scaled"]
"""``scaled``: Ray Serve loads and unloads it, by its load."""

_RETRY_S = 30.0  # after which a model that an operator unloaded may be there again
_BUSY_RETRY_S = 10.0  # after which one of the models that are in the way may be idle
_LOOKS = 8  # at idle models in the shortest time to live


@dataclass(frozen=True, slots=True)
class ModelState:
    """What an operator sees of a model.

    awaited  whether a replica should answer now
    running  requests under way, or that wait for it to be loaded
    idle_s   since its last request, or since it was loaded
    """

    name: str
    state: State
    load: str
    pinned: bool
    awaited: bool
    running: int
    idle_s: float
    idle_ttl_s: float | None

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "state": self.state,
            "load": self.load,
            "pinned": self.pinned,
            "running": self.running,
            "idle_s": round(self.idle_s, 1),
            "idle_ttl_s": self.idle_ttl_s,
        }


class Loader(Protocol):
    """Starts and ends models."""

    async def load(self, name: str) -> None:
        """Until the model answers.

        Raises:
            PacelineError: it does not start; what was begun of it has ended.
        """

    async def unload(self, name: str) -> None:
        """Until its requests are answered and its cores are free."""

    async def loaded(self) -> Sequence[str]:
        """The models that are loaded, or being loaded: what an earlier lifecycle left behind."""

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        """Which of the ``movable`` models, the first ones first, have to leave for this one.

        Raises:
            RoomError: it does not fit, even if all of them leave.
        """

    async def remember(self, decisions: Decisions) -> None:
        """Keep what an operator decided, in place of what was kept until now, so that it outlives this process.

        Raises:
            PacelineError: it cannot be kept.
        """

    async def remembered(self) -> Decisions:
        """What is kept.

        Raises:
            PacelineError: that cannot be found out.
        """


@dataclass(slots=True)
class _Kept:
    """A model. ``stopped``: an operator unloaded it, and no request loads it again."""

    residency: Residency
    state: State
    pinned: bool
    stopped: bool = False
    running: int = 0
    used: float = field(default_factory=monotonic)
    loading: asyncio.Task[None] | None = None


class ModelLifecycle:
    """See the module. ``residencies``: of every model of the service, by name."""

    def __init__(self, loader: Loader, residencies: Mapping[str, Residency]) -> None:
        self._loader = loader
        self._models = {name: _Kept(own, _first_state(own), own.pinned) for name, own in residencies.items()}
        self._changing = asyncio.Lock()  # one model at a time is loaded or unloaded

    def states(self) -> list[ModelState]:
        """Of all models, in the order of the models file."""
        now = monotonic()
        return [
            ModelState(
                name, one.state, one.residency.load, one.pinned, _is_awaited(one), one.running,
                0.0 if one.running else now - one.used, one.residency.idle_ttl_s,
            )
            for name, one in self._models.items()
        ]  # fmt: skip

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """The model stays in memory for a request; it is loaded first where its residency says so.

        Raises:
            RefusedError: 404, there is no such model; 503, it is unloaded and stays so, it does not start, or models
                that may not leave are in its way.
        """
        model = self._model(name)
        model.running += 1
        try:
            if model.state not in ("loaded", "scaled"):
                if model.stopped:
                    message = f"{name} is unloaded; an operator has to load it (paceline models load {name})"
                    raise RefusedError(503, message, code=UNAVAILABLE, retry_after_s=_RETRY_S)
                await self._load(name, model)
            yield
        finally:
            model.running -= 1
            model.used = monotonic()

    async def load(self, name: str) -> ModelState:
        """Load it, making room where that is needed. Returns when it answers.

        Raises:
            RefusedError: as `use`; 409 where Ray Serve does it.
        """
        model = self._model(name)
        self._refuse_scaled(name, model)
        await self._decide(model, pinned=model.pinned, stopped=False)
        await self._load(name, model)
        return self._state(name)

    async def unload(self, name: str) -> ModelState:
        """Unload it. Requests under way are answered; new ones are refused until it is loaded again, or load it where
        the models file says ``load: on_demand``.

        Raises:
            RefusedError: 404; 409, it is pinned, or Ray Serve does it.
        """
        model = self._model(name)
        self._refuse_scaled(name, model)
        if model.pinned:
            raise RefusedError(409, f"{name} is pinned; unpin it first", param="model", code="model_pinned")
        await self._decide(model, pinned=False, stopped=model.residency.load == "eager")
        async with self._changing:
            await self._unload(name, model)
        return self._state(name)

    async def pin(self, name: str, *, pinned: bool) -> ModelState:
        """Keep it in memory, or let it leave again. It does not load it.

        Raises:
            RefusedError: 404; 409, Ray Serve loads and unloads it.
        """
        model = self._model(name)
        self._refuse_scaled(name, model)
        await self._decide(model, pinned=pinned, stopped=model.stopped)
        return self._state(name)

    async def restore(self) -> None:
        """Find out what is loaded and what an operator decided, where there was an earlier lifecycle of this service.

        Raises:
            PacelineError: that cannot be found out.
        """
        known = await self._loader.remembered()
        loaded = await self._loader.loaded()
        for name, model in self._models.items():
            if model.state != "scaled":
                model.state = "loaded" if name in loaded else "unloaded"
                model.pinned = name in known.pinned or (model.residency.pinned and name not in known.unpinned)
                model.stopped = name in known.stopped and model.state == "unloaded"

    async def watch(self) -> None:
        """Unload what is idle for too long, for ever."""
        limits = [ttl for one in self._models.values() if (ttl := one.residency.idle_ttl_s) is not None]
        while limits:
            await asyncio.sleep(min(limits) / _LOOKS)
            try:
                await self.unload_idle()
            except Exception as error:  # the next look may succeed
                log.warning("idle models could not be unloaded (%s: %s)", type(error).__name__, error)

    async def unload_idle(self) -> None:
        """Unload every model whose time to live is over."""
        for name, model in self._models.items():
            async with self._changing:
                limit, idle = model.residency.idle_ttl_s, monotonic() - model.used
                if limit is not None and idle > limit and self._is_movable(model):
                    log.info("%s had no request for %.0f s and is unloaded", name, idle)
                    await self._unload(name, model)

    async def _decide(self, model: _Kept, *, pinned: bool, stopped: bool) -> None:
        """An operator's word on a model. Raises RefusedError (503): it cannot be kept, and does not count."""
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
        """All who want the model wait for the same attempt."""
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
                model.state, model.used = "loaded", monotonic()
        finally:
            model.loading = None

    async def _make_room(self, name: str) -> None:
        movable = sorted(
            (other for other, one in self._models.items() if self._is_movable(one)),
            key=lambda other: self._models[other].used,
        )
        for other in await self._loader.to_unload(name, movable):
            log.info("%s is unloaded to make room for %s", other, name)
            await self._unload(other, self._models[other])

    async def _unload(self, name: str, model: _Kept) -> None:
        if model.state != "loaded":
            return
        model.state = "unloading"
        try:
            await self._loader.unload(name)
        finally:
            model.state = "unloaded"

    def _is_movable(self, model: _Kept) -> bool:
        return model.state == "loaded" and not model.pinned and not model.running

    def _model(self, name: str) -> _Kept:
        if name not in self._models:
            raise model_not_found(name, list(self._models))
        return self._models[name]

    def _state(self, name: str) -> ModelState:
        return next(state for state in self.states() if state.name == name)

    @staticmethod
    def _refuse_scaled(name: str, model: _Kept) -> None:
        if model.state == "scaled":
            message = f"Ray Serve loads and unloads {name} by its load (autoscaling); change its bounds instead"
            raise RefusedError(409, message, param="model", code="model_autoscaled")


def _is_awaited(model: _Kept) -> bool:
    scaling = model.residency.autoscaling
    return model.state == "loaded" if scaling is None else scaling.min_replicas > 0


def _first_state(residency: Residency) -> State:
    if residency.autoscaling is not None:
        return "scaled"
    return "loaded" if residency.load == "eager" else "unloaded"
