"""Which models of a service are in memory: loaded by the operator or on demand, unloaded when idle or to make room.

`ModelLifecycle` decides; a `Loader` does it. One lifecycle has all models of a service, and is used from one event
loop. Other processes that answer requests ask it through `paceline.serving.serve_lifecycle`, and report who uses what.
What fits is the planner's answer (`paceline.placement.planning.groups`), which the loader asks for. No HTTP, no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, Protocol

from paceline.core.errors import PacelineError, RoomError
from paceline.placement.planning.residency import Residency
from paceline.serving.refused import UNAVAILABLE, RefusedError, model_not_found

State = Literal["loaded", "loading", "unloading", "unloaded", "scaled"]
"""``scaled``: Ray Serve loads and unloads it, by its load."""

ANSWERS: tuple[State, ...] = ("loaded", "scaled")
"""The states in which a request needs nobody's decision."""


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


@dataclass(frozen=True, slots=True)
class Report:
    """What a process of HTTP says of itself, to the one that decides.

    running  requests of each model that are under way here, or wait
    idle_s   seconds since a request of each model ended here
    keys     requests that count for the limit of each (hashed) API key
    seen     version of the newest view that this process acts by
    """

    running: Mapping[str, int] = field(default_factory=dict)
    idle_s: Mapping[str, float] = field(default_factory=dict)
    keys: Mapping[str, int] = field(default_factory=dict)
    seen: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What that one answers. ``keys``: as in `Report`, of all other processes together."""

    version: int
    states: Sequence[ModelState]
    keys: Mapping[str, int] = field(default_factory=dict)


class Lifecycle(Protocol):
    """Which models of a service are in memory, as a process of HTTP asks for it."""

    def states(self) -> list[ModelState]:
        """Of all models, in the order of the models file."""

    def use(self, name: str) -> AbstractAsyncContextManager[None]:
        """The model stays in memory for a request; it is loaded first where its residency says so.

        Raises:
            RefusedError: 404, there is no such model; 503, it is unloaded and stays so, it does not start, or models
                that may not leave are in its way.
        """

    async def load(self, name: str) -> ModelState:
        """Load it, making room where that is needed. Returns when it answers.

        Raises:
            RefusedError: as `use`; 409 where Ray Serve does it.
        """

    async def unload(self, name: str) -> ModelState:
        """Unload it. Requests under way are answered; new ones are refused until it is loaded again, or load it where
        the models file says ``load: on_demand``.

        Raises:
            RefusedError: 404; 409, it is pinned, or Ray Serve does it.
        """

    async def pin(self, name: str, *, pinned: bool) -> ModelState:
        """Keep it in memory, or let it leave again. It does not load it.

        Raises:
            RefusedError: 404; 409, Ray Serve loads and unloads it.
        """

    async def restore(self) -> None:
        """Find out what is loaded and what an operator decided, where this service ran before.

        Raises:
            PacelineError: that cannot be found out.
        """

    async def watch(self) -> None:
        """Do what has to be done while no request comes, for ever."""


def first_state(residency: Residency) -> State:
    """Of a model when its service starts."""
    if residency.autoscaling is not None:
        return "scaled"
    return "loaded" if residency.load == "eager" else "unloaded"


def is_awaited(residency: Residency, state: State) -> bool:
    """Whether a replica should answer."""
    scaling = residency.autoscaling
    return state == "loaded" if scaling is None else scaling.min_replicas > 0


@dataclass(frozen=True, slots=True)
class Decisions:
    """What an operator decided while a service ran: models by name.

    Those that are as the models file says are in none of these.

    pinned    stay in memory
    unpinned  may leave, though the file pins them
    stopped   are unloaded, and no request loads them
    """

    pinned: Sequence[str] = ()
    unpinned: Sequence[str] = ()
    stopped: Sequence[str] = ()


PERIOD_S = 0.5  # between the reports of a process
SILENT_S = 10.0  # after which a process that said nothing is taken for dead: its requests are
_SETTLE_S = 4 * PERIOD_S  # in which all that live have found a new decider
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Received:
    report: Report
    at: float


class Reports:
    """Reports of the processes of HTTP: the newest of each.

    ``awaited``: whether there are other processes at all, which will report soon.
    """

    def __init__(self, *, awaited: bool = False) -> None:
        self._received: dict[str, _Received] = {}
        self._complete_at = monotonic() + (_SETTLE_S if awaited else 0.0)

    def put(self, process: str, report: Report) -> None:
        """What a process says now."""
        self._received[process] = _Received(report, monotonic())

    def running(self, model: str) -> int:
        """Requests of a model in all processes."""
        return sum(one.report.running.get(model, 0) for one in self._living().values())

    def used(self, model: str) -> float:
        """When a request of it ended last, by `monotonic`."""
        times = [one.at - one.report.idle_s[model] for one in self._received.values() if model in one.report.idle_s]
        return max(times, default=float("-inf"))

    def keys(self, process: str) -> Mapping[str, int]:
        """Requests by key of all processes but this one."""
        total: Counter[str] = Counter()
        for name, one in self._living().items():
            if name != process:
                total.update(one.report.keys)
        return total

    async def acknowledged(self, version: int) -> None:
        """Until every process acts by this version, and so has reported what it began before it knew it."""
        while monotonic() < self._complete_at or any(one.report.seen < version for one in self._living().values()):
            await asyncio.sleep(_LOOK_S)

    def _living(self) -> Mapping[str, _Received]:
        now = monotonic()
        self._received = {name: one for name, one in self._received.items() if now - one.at < SILENT_S}
        return self._received


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
    """A `Lifecycle`, and where others are asked to, `reported` and `demand`.

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
        model = self._model(name)
        self._refuse_scaled(name, model)
        await self._decide(model, pinned=model.pinned, stopped=False)
        await self._load(name, model)
        return self._state(name)

    async def unload(self, name: str) -> ModelState:
        model = self._model(name)
        self._refuse_scaled(name, model)
        if model.pinned:
            raise RefusedError(409, f"{name} is pinned; unpin it first", param="model", code="model_pinned")
        await self._decide(model, pinned=False, stopped=model.residency.load == "eager")
        async with self._changing:
            await self._unload(name)
        return self._state(name)

    async def pin(self, name: str, *, pinned: bool) -> ModelState:
        model = self._model(name)
        self._refuse_scaled(name, model)
        await self._decide(model, pinned=pinned, stopped=model.stopped)
        return self._state(name)

    async def restore(self) -> None:
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
