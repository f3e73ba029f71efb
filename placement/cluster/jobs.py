"""Independent jobs on the cores of a cluster: each worker holds its own cores, and does one job after the other.

If a job raises, or its worker or node is lost, only that job is affected: others continue, and a lost job is retried
once. Cores come from the same allocator as those of model workers, so that no core is used twice. Jobs, and where their
results are stored, are the caller's.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.core.errors import PlanError, WorkerError
from paceline.placement.cluster.core_allocator import WORKERS, CoreRequest, call_allocator, give_back, worker_name
from paceline.placement.cluster.nodes import NAMESPACE, RESOURCE, connect
from paceline.placement.host import environment
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance, detect, instance
from paceline.placement.planning.planner import cpus_of
from paceline.placement.remote.reconnect import STARTUP_TIMEOUT_S

log = logging.getLogger("paceline")

_PLACE_S = 30.0  # to find a node
_START_S = STARTUP_TIMEOUT_S  # until a worker runs
_TRIES = 2
_HERE = "local"

Job = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class JobResult:
    """Outcome of a job. ``error``: why it has no result."""

    index: int
    result: Any
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Share:
    """Worker's share of its node: cores, CPUs (first and last), and the environment variables for them."""

    cores: CoreRange
    cpus: tuple[int, int]
    env: tuple[tuple[str, str], ...]


class _JobWorker:
    """Process with cores. ``make`` returns the function that does a job."""

    def __init__(self, share: _Share, make: Callable[[], Job]) -> None:
        environment.check(share.env)
        self._locks = CoreLocks(share.cores, node=ray.get_runtime_context().get_node_id())
        self._locks.acquire()
        environment.share_cpus(*share.cpus)
        torch.set_num_threads(int(dict(share.env)["OMP_NUM_THREADS"]))
        self._do: Job = make()

    def ready(self) -> tuple[str, list[int]]:
        return environment.assigned_cores(), sorted(os.sched_getaffinity(0))

    def do(self, job: Any) -> Any:
        return self._do(job)


@dataclass(frozen=True, slots=True)
class _Running:
    """Worker and the resources that it holds."""

    actor: ray.actor.ActorHandle
    name: str
    group: PlacementGroup


class JobWorkers(AbstractContextManager["JobWorkers"]):
    """Workers for jobs: up to ``count``, each on ``degree`` cores, as far as the cluster has capacity.

    make      without arguments -> function that is called with a job; it and jobs can be pickled
    address   of the cluster; "auto": that of this machine; "local": a new one for the jobs on this machine

    Raises:
        PlanError: there is no such cluster, or no node has capacity for a worker.
        WorkerError: the cluster does not respond, or no worker starts.
    """

    def __init__(self, make: Callable[[], Job], *, address: str, degree: int, count: int) -> None:
        if not ray.is_initialized():
            connect(None if address == _HERE else address, cores=os.cpu_count() or 1)
        self._make, self._degree, self._count = make, degree, count
        self._workers: list[_Running] = []
        self._claimed: list[str] = []

    def __enter__(self) -> JobWorkers:
        try:
            self._fill(wait=_PLACE_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in tuple(self._workers):
            self._remove(worker)
        if self._claimed:
            give_back(self._claimed, _PLACE_S)

    def __len__(self) -> int:
        return len(self._workers)

    def run(self, jobs: Sequence[Any]) -> Iterator[JobResult]:
        """Do all jobs, in order as workers become free, and yield outcomes as they arrive.

        The outcome of a job that raised has the error's text. Raises only what the consumer of the outcomes raises.
        """
        waiting = deque((index, 1) for index in range(len(jobs)))
        under_way: dict[ray.ObjectRef, tuple[_Running, int, int]] = {}
        while waiting or under_way:
            busy = [worker.name for worker, *_ in under_way.values()]
            for worker in [one for one in self._workers if one.name not in busy]:
                if waiting:
                    index, attempt = waiting.popleft()
                    under_way[worker.actor.do.remote(jobs[index])] = worker, index, attempt
            if not under_way:
                yield from (JobResult(index, None, "no worker of the cluster is left") for index, _ in waiting)
                return
            (done,), _ = ray.wait(list(under_way), num_returns=1)
            worker, index, attempt = under_way.pop(done)
            try:
                yield JobResult(index, ray.get(done))
            except ray.exceptions.RayTaskError as error:
                yield JobResult(index, None, f"{type(error.cause).__name__}: {error.cause}")
            except ray.exceptions.RayError as error:  # the process or its node is lost
                self._remove(worker)
                if attempt < _TRIES:
                    waiting.appendleft((index, attempt + 1))
                if len(waiting) > len(self._workers) - len(under_way):  # more than the free workers can take
                    with suppress(PlanError, WorkerError):
                        self._fill(wait=0.0 if self._workers else _PLACE_S)
                if attempt == _TRIES:
                    yield JobResult(index, None, f"its worker was lost {attempt} times: {type(error).__name__}")

    def _fill(self, wait: float) -> None:
        """Start workers concurrently until there are ``count``, or no capacity is left."""
        new: list[_Running] = []
        while len(self._workers) < self._count:
            group = placement_group([{RESOURCE: float(self._degree)}])
            if not group.wait(max(1.0, 0.0 if self._workers else wait)):
                remove_placement_group(group)
                if self._workers:
                    break
                raise PlanError(
                    f"no node of the cluster has {self._degree} free {RESOURCE} for a cell; stop a model, add a "
                    "node, or start Ray's nodes with that resource (ray start --resources)"
                )
            try:
                new.append(self._start(group))
            except BaseException:
                remove_placement_group(group)
                raise
            self._workers.append(new[-1])
        for worker in new:
            self._await(worker)

    def _start(self, group: PlacementGroup) -> _Running:
        node = str(next(iter(placement_group_table(group)["bundles_to_node_id"].values())))
        machine = _machine(node, self._degree)
        request = f"{WORKERS}cell-{secrets.token_hex(4)}"
        first = CoreRange(0, self._degree - 1)
        (cores,) = call_allocator("claim", node, machine, [CoreRequest(request, first)], timeout=_START_S)
        name = worker_name(request, node, cores)
        self._claimed += [request, name]
        cpus = cpus_of(machine, cores) if machine.sdk else (cores.first, cores.last)
        env = environment.planned(machine, cores, label="cell", threads=cpus[1] - cpus[0] + 1)
        actor = ray.remote(_JobWorker).options(
            name=name, namespace=NAMESPACE, num_cpus=0, resources={RESOURCE: self._degree}, max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            runtime_env={"env_vars": environment.for_actor(env)},
        ).remote(_Share(cores, cpus, env), self._make)  # fmt: skip
        return _Running(actor, name, group)

    def _await(self, worker: _Running) -> None:
        try:
            ray.get(worker.actor.ready.remote(), timeout=_START_S)
        except ray.exceptions.RayError as error:
            self._remove(worker)
            if not self._workers:
                raise WorkerError(f"worker {worker.name} did not start ({error}); see its log") from error
            log.warning("worker %s did not start: %s", worker.name, error)
        else:
            call_allocator("confirm", [worker.name], timeout=_START_S)

    def _remove(self, worker: _Running) -> None:
        self._workers.remove(worker)
        ray.kill(worker.actor)
        give_back([worker.name], _PLACE_S)
        remove_placement_group(worker.group)


def _machine(node: str, degree: int) -> Instance:
    """Return the node's instance type, for the allocator; without an accelerator each CPU counts as a core."""
    found = detect()
    if found is not None:
        return found
    (cores,) = (int(one["Resources"].get(RESOURCE, 0)) for one in ray.nodes() if one["NodeID"] == node)
    return replace(instance("cpu"), devices=cores, vcpus=cores, degrees=(1,) if degree == 1 else (1, degree))
