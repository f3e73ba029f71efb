"""What is known of the models of a service, and who may be asked to change it: values and a protocol.

`paceline.serving.lifecycle` decides, in one process of a service; `paceline.serving.shared_lifecycle` is what the
others have. Not here: HTTP and Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.placement.planning.residency import Residency

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
