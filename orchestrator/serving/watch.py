"""Replaces Ray Serve's controller and the core allocator when they do not answer: a process that is stopped, or hangs.

Ray starts an actor again whose process ended, and asks none whether it answers. The controller asks replicas and
proxies, and nobody asks it; so while it is stopped, nothing else is replaced. Every replica of ours, of the edge and of
models, therefore asks both: of any two processes that stop, one that asks is left. Replicas and proxies are the
controller's (`paceline.serving.deployments`), a draft its target's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray._private.state import actors  # the state without its dashboard; it has no public name
from ray.exceptions import GetTimeoutError, RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from paceline.placement.cluster import core_allocator, nodes

log = logging.getLogger("paceline")

WATCHED = ((SERVE_CONTROLLER_NAME, SERVE_NAMESPACE), (core_allocator.NAME, nodes.NAMESPACE))
"""Name and namespace of each. Both may be killed at any time: they keep what they know in Ray's key-value store."""
_PERIOD_S = 2.0  # between questions, in a small cluster
_SMALL_NODES = 4  # up to which it is one
_ANSWER_S = 3.0  # that an answer may take: with the pauses, 15 seconds until an actor is killed
_MISSES = 3  # in a row, of one process


class NamedActor(Protocol):
    """An actor that is watched."""

    def process(self) -> int | None:
        """Its pid; None while there is no such actor, or Ray is starting it."""

    def answers(self) -> bool:
        """Whether it does, in good time. One that has just ended counts as answering: Ray knows of it."""

    def kill(self) -> None:
        """End its process, for Ray to start it again."""


@dataclass(frozen=True, slots=True)
class RayActor:
    """An actor of this cluster. While there is none of that name, nothing is asked of it."""

    name: str
    namespace: str

    def process(self) -> int | None:
        """See `NamedActor`."""
        try:
            state = actors(self._handle()._actor_id.hex())
        except (ValueError, RayError):
            return None
        return int(state["Pid"]) if state.get("State") == "ALIVE" else None

    def answers(self) -> bool:
        """See `NamedActor`."""
        try:
            ray.get(self._handle().__ray_ready__.options(max_task_retries=0).remote(), timeout=_ANSWER_S)
        except GetTimeoutError:
            return False
        except (ValueError, RayError):
            return True
        return True

    def kill(self) -> None:
        """See `NamedActor`. What does not end by itself, as nothing stopped can, Ray kills some seconds later."""
        try:
            ray.kill(self._handle(), no_restart=False)
        except (ValueError, RayError):
            log.warning("%s was gone when it was to be killed", self.name)

    def _handle(self) -> Any:
        return ray.get_actor(self.name, namespace=self.namespace)


class Watch:
    """Counts for one actor how often it did not answer."""

    def __init__(self, name: str, actor: NamedActor) -> None:
        self._name, self._actor = name, actor
        self._process: int | None = None
        self._missed = 0

    @property
    def suspects(self) -> bool:
        """Whether the last question went without an answer."""
        return self._missed > 0

    def look(self) -> None:
        """Ask once. Kills what has not answered for the last time."""
        if self._actor.answers():
            self._missed = 0
            return
        process = self._actor.process()
        self._missed = self._missed + 1 if process == self._process else 1
        self._process = process  # another one than before: somebody has replaced it meanwhile
        if process is not None and self._missed >= _MISSES:
            log.error("%s (process %s) did not answer %s times in a row; it is killed", self._name, process, _MISSES)
            self._actor.kill()
            self._missed = 0


def pause_s(living: int, *, suspects: bool = False) -> float:
    """Seconds from an answer to the next question.

    As many replicas ask as the cluster has room for, and one controller answers them all: so that it has no more to
    answer in a large cluster, each asks the less often the more nodes there are. Who got no answer asks again soon; of
    many one is always about to ask, so what has stopped is found no later than in a small cluster.

    living  nodes of the cluster
    """
    return _PERIOD_S if suspects else _PERIOD_S * max(1.0, living / _SMALL_NODES)


def watch_cluster(watched: Sequence[tuple[str, str]] = WATCHED) -> None:
    """Watch actors, each in a thread, until this process ends."""
    for name, namespace in watched:
        arguments = (Watch(name, RayActor(name, namespace)),)
        threading.Thread(target=_go_on, args=arguments, daemon=True, name=f"watch-{name}").start()


def _go_on(watch: Watch) -> None:
    pause = _PERIOD_S
    while True:
        time.sleep(pause)
        try:
            watch.look()
            pause = pause_s(len(nodes.living()), suspects=watch.suspects)
        except Exception:  # of Ray's client while its store is away, say: this thread must not end
            log.exception("a watched actor could not be asked")
