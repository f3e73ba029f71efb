"""Which models of a service are in memory: loaded by the operator or on demand, unloaded when idle or to make room.

`ModelLifecycle` decides; a `Loader` does it. One lifecycle has all models of a service, and is used from one event
loop. Other processes that answer requests ask it through `paceline.serving.shared_lifecycle`, and report who uses what.
What fits is the planner's answer (`paceline.placement.planning.room`), which the loader asks for. No HTTP, no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from paceline.core.errors import PacelineError, RoomError
from paceline.placement.planning.residency import Residency
from paceline.serving.decisions import Decisions
from paceline.serving.model_state import ANSWERS, ModelState, Report, State, View, first_state, is_awaited
from paceline.serving.refused import UNAVAILABLE, RefusedError, model_not_found
from paceline.serving.reports import Reports

log = logging.getLogger("paceline")

_RETRY_S = 30.0  # after which a model that an operator unloaded may be there again
_BUSY_RETRY_S = 10.0  # after which one of the models that are in the way may be idle
_LOOKS = 8  # at idle models in the shortest time to live


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
    """A `paceline.serving.model_state.Lifecycle`, and where others are asked to, `reported` and `demand`.

    residencies  of every model of the service, by name
    shared       whether other processes use the models too, and report it
    """

    def __init__(self, loader: Loader, residencies: Mapping[str, Residency], *, shared: bool = False) -> None:
        self._loader = loader
        self._models = {name: _Kept(own, first_state(own), own.pinned) for name, own in residencies.items()}
        self._changing = asyncio.Lock()  # one model at a time is loaded or unloaded
        self._reports = Reports(awaited=shared)
        self._version = time.time_ns()  # above those of an earlier lifecycle of this service

    def states(self) -> list[ModelState]:
        """See `Lifecycle`."""
        now = monotonic()
        return [
            ModelState(
                name, one.state, one.residency.load, one.pinned, is_awaited(one.residency, one.state),
                running, 0.0 if running else now - self._used(name), one.residency.idle_ttl_s,
            )
            for name, one in self._models.items()
            for running in [self._running(name)]
        ]  # fmt: skip

    def reported(self, process: str, report: Report) -> View:
        """Another process says who uses what, and is told what it may use without asking."""
        self._reports.put(process, report)
        return View(self._version, tuple(self.states()), dict(self._reports.keys(process)))

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """See `Lifecycle`."""
        model = self._model(name)
        model.running += 1
        try:
            await self.demand(name)
            yield
        finally:
            model.running -= 1
            model.used = monotonic()

    async def demand(self, name: str) -> None:
        """Load it for a request, where it is not loaded and may be. Raises as `use`."""
        model = self._model(name)
        if model.state in ANSWERS:
            return
        if model.stopped:
            message = f"{name} is unloaded; an operator has to load it (paceline models load {name})"
            raise RefusedError(503, message, code=UNAVAILABLE, retry_after_s=_RETRY_S)
        await self._load(name, model)

    async def load(self, name: str) -> ModelState:
        """See `Lifecycle`."""
        model = self._model(name)
        self._refuse_scaled(name, model)
        await self._decide(model, pinned=model.pinned, stopped=False)
        await self._load(name, model)
        return self._state(name)

    async def unload(self, name: str) -> ModelState:
        """See `Lifecycle`."""
        model = self._model(name)
        self._refuse_scaled(name, model)
        if model.pinned:
            raise RefusedError(409, f"{name} is pinned; unpin it first", param="model", code="model_pinned")
        await self._decide(model, pinned=False, stopped=model.residency.load == "eager")
        async with self._changing:
            await self._unload(name)
        return self._state(name)

    async def pin(self, name: str, *, pinned: bool) -> ModelState:
        """See `Lifecycle`."""
        model = self._model(name)
        self._refuse_scaled(name, model)
        await self._decide(model, pinned=pinned, stopped=model.stopped)
        return self._state(name)

    async def restore(self) -> None:
        """See `Lifecycle`."""
        known = await self._loader.remembered()
        loaded = await self._loader.loaded()
        for name, model in self._models.items():
            if model.state != "scaled":
                model.state = "loaded" if name in loaded else "unloaded"
                model.pinned = name in known.pinned or (model.residency.pinned and name not in known.unpinned)
                model.stopped = name in known.stopped and model.state == "unloaded"
        self._version += 1

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
                limit, idle = model.residency.idle_ttl_s, monotonic() - self._used(name)
                if limit is None or idle <= limit or not self._is_movable(name):
                    continue
                if await self._unload(name, unless_used=True):
                    log.info("%s had no request for %.0f s and was unloaded", name, idle)

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
        self._version += 1

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
                self._set(model, "loading")
                try:
                    await self._loader.load(name)
                except BaseException:
                    self._set(model, "unloaded")
                    raise
                self._set(model, "loaded")
                model.used = monotonic()
        finally:
            model.loading = None

    async def _make_room(self, name: str) -> None:
        while leave := await self._loader.to_unload(name, self._movable()):
            for other in leave:
                if not await self._unload(other, unless_used=True):
                    break  # a request came meanwhile: look again
                log.info("%s was unloaded to make room for %s", other, name)
            else:
                return

    def _movable(self) -> list[str]:
        """What may leave, the least recently used first."""
        return sorted((name for name in self._models if self._is_movable(name)), key=self._used)

    async def _unload(self, name: str, *, unless_used: bool = False) -> bool:
        """Unload a model. False: somebody uses it after all, as is known only when all processes have been told."""
        model = self._models[name]
        after: State = "loaded"
        if model.state != "loaded":
            return True
        self._set(model, "unloading")
        try:
            await self._reports.acknowledged(self._version)
            if unless_used and (model.pinned or self._running(name)):
                return False
            after = "unloaded"
            await self._loader.unload(name)
            return True
        finally:
            self._set(model, after)

    def _set(self, model: _Kept, state: State) -> None:
        model.state = state
        self._version += 1

    def _running(self, name: str) -> int:
        return self._models[name].running + self._reports.running(name)

    def _used(self, name: str) -> float:
        return max(self._models[name].used, self._reports.used(name))

    def _is_movable(self, name: str) -> bool:
        model = self._models[name]
        return model.state == "loaded" and not model.pinned and not self._running(name)

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
