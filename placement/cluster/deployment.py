"""`launch(plan)`: a plan becomes running workers, and requests go to them.

    with launch(plan) as models:
        for piece in models.stream("chat", [ids], max_new_tokens=64): ...

The caller's process only hands out requests and collects tokens, one message a round. It also notices that a target
died, restarts it, and lets the new one read what was emitted, so that the same tokens go on.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import ray
from ray.util.placement_group import PlacementGroup

from paceline.core.errors import ConfigurationError, PlacementError, PlanError, TargetLostError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.actors import STREAMS, WATCH, DraftWorker, Ready, TargetWorker
from paceline.placement.cluster.calls import Call, Stream
from paceline.placement.cluster.core_allocator import call_allocator, end_unused
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE, connect
from paceline.placement.cluster.reservation import RESOURCE as RESOURCE
from paceline.placement.cluster.reservation import Reservation
from paceline.placement.cluster.roles import CALL_PARAMS, Settings, TokenDelta, maker
from paceline.placement.cluster.worker_spec import WorkerSpec
from paceline.placement.host import environment
from paceline.placement.host.processes import Process
from paceline.placement.planning import planner
from paceline.placement.planning.core_range import CoreRange, Fragmentation
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement, Plan

_CALL_S = 30.0
_ALIVE_S = 5.0  # that a target may take to say that it is alive


class Deployment:
    """Running models. A context manager: leaving it ends every worker."""

    def __init__(self, plan: Plan, fault_policy: FaultPolicy, groups: Sequence[WorkerGroup] | None = None) -> None:
        self.plan, self._policy = plan, fault_policy
        if groups is None:
            groups = [WorkerGroup(plan.instance, members, fault_policy) for members in groups_of(plan)]
        self._groups = list(groups)

    def start(self) -> Deployment:
        """Start all groups; if one cannot start, none is left."""
        try:
            _start(self._groups)
        except BaseException:
            self.close()  # the core allocator, too
            raise
        return self

    @property
    def models(self) -> list[str]:
        """Labels of the targets that run."""
        return [label for group in self._groups for label in group.targets]

    def group(self, model: str) -> WorkerGroup:
        """The group of a target.

        Raises:
            ConfigurationError: no such target runs.
        """
        group = next((group for group in self._groups if model in group.targets), None)
        if group is None:
            raise ConfigurationError(f"no target {model!r} runs here; there are {', '.join(self.models)}")
        return group

    def stream(
        self, model: str, prompts: Sequence[Sequence[int]], params: object = None, **overrides: object
    ) -> Stream:
        """Continue prompts; one delta for each request and round.

        ``params``: `paceline.SamplingParams`; ``overrides`` replace some of its fields, or give them without it.

        Several calls, from several threads too, share a target's rounds; those that find no slot wait for one.

        Raises:
            ConfigurationError: no such target runs, or a parameter cannot be sent to another process.
            RequestError: the request cannot be served.
            TargetLostError: the target died more often than ``FaultPolicy.max_target_restarts``; has the tokens so far.
        """
        group = self.group(model)
        call = Call.of(prompts, maker(CALL_PARAMS)(params, overrides))
        return Stream(self._persist(group, model, call), call)

    def sample(
        self, model: str, prompts: Sequence[Sequence[int]], params: object = None, **overrides: object
    ) -> list[list[int]]:
        """The whole texts, prompts included."""
        texts = [list(prompt) for prompt in prompts]
        for piece in self.stream(model, prompts, params, **overrides):
            texts[piece.index] += piece.tokens
        return texts

    def statistics(self, model: str) -> Settings:
        """Of all calls to a target since it was last idle, its drafter's health included."""
        statistics: Settings = ray.get(
            self.group(model).actor(model).statistics.options(concurrency_group=WATCH).remote(), timeout=_CALL_S
        )
        return statistics

    def fragmentation(self) -> dict[str, Fragmentation]:
        """Node -> what is free there, and in what pieces."""
        report: dict[str, Fragmentation] = call_allocator("report", timeout=_CALL_S)
        return report

    def cores(self) -> dict[str, CoreRange]:
        """Label -> cores it really has, of all workers that run."""
        return {label: cores for group in self._groups for label, cores in group.cores.items()}

    def stop(self, model: str) -> None:
        """End one target, and the drafts and targets of its group."""
        group = self.group(model)
        group.stop()
        self._groups.remove(group)

    def add(self, plan: Plan) -> None:
        """Start the groups of another plan beside those that run; cores that are taken are replaced by free ones.

        Raises:
            PlanError: a model of that name runs, a model cannot be run as it was planned, or there is no room.
            WorkerError: a worker did not start.
        """
        running = {item.label for group in self._groups for item in group.placements}
        twice = next((item.label for item in plan.placements if item.label in running), None)
        if twice is not None:
            raise PlanError(f"{twice} runs already; stop it, or add the other one under another name")
        planner.check(plan)
        groups = [WorkerGroup(plan.instance, members, self._policy) for members in groups_of(plan)]
        _start(groups)
        self._groups += groups

    def close(self) -> None:
        """End everything, and the core allocator too if nothing else uses it."""
        groups, self._groups = self._groups, []
        try:
            _stop(groups)
        finally:
            end_unused(_CALL_S)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call

    def _persist(self, group: WorkerGroup, model: str, call: Call) -> Generator[TokenDelta, None, None]:
        while call.open and not call.unwanted:
            try:
                worker = group.actor(model)
            except PlacementError as why:
                raise self._lost(model, call, str(why)) from why
            try:
                yield from self._attempt(worker, call)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                call.deaths += 1
                if call.deaths > self._policy.max_target_restarts:
                    raise self._lost(model, call, str(error)) from error
                try:
                    group.restart(model, worker, hung=isinstance(error, ray.exceptions.GetTimeoutError))
                except PlacementError as why:
                    raise self._lost(model, call, str(why)) from why

    def _lost(self, model: str, call: Call, why: str) -> TargetLostError:
        return TargetLostError(
            f"{model} was lost {call.deaths} times in one request ({why}); `tokens` has what came before, and the same "
            "request with the same seed gives the same tokens again",
            tuple(tuple(tokens) for tokens in call.emitted),
        )

    def _attempt(self, worker: ray.actor.ActorHandle, call: Call) -> Iterator[TokenDelta]:
        """Stream from a target that lives, until the call is done or it dies."""
        ticket = secrets.token_hex(8)
        stream = worker.stream.options(num_returns="streaming").remote(call.request(ticket))
        abort = worker.abort.options(concurrency_group=WATCH)
        call.abort = partial(abort.remote, ticket)
        timeout = self._policy.startup_timeout_s + self._policy.stall_timeout_s
        try:
            while not call.unwanted:
                self._await(stream, worker, timeout)
                timeout = self._policy.stall_timeout_s
                try:
                    piece: TokenDelta = _value(next(stream))
                except StopIteration:
                    return
                call.emitted[piece.index] += piece.tokens
                if piece.finish_reason is not None:
                    call.open.remove(piece.index)
                yield piece
        finally:
            call.abort = None
            if call.unwanted:
                with suppress(ray.exceptions.RayError):
                    abort.remote(ticket)

    def _await(self, stream: ray.ObjectRefGenerator, worker: ray.actor.ActorHandle, timeout: float) -> None:
        """Until there is a piece; a target that serves others meanwhile is waited for.

        Raises:
            GetTimeoutError: it makes no progress for any request, or does not answer at all.
        """
        before = None
        while not ray.wait([stream], timeout=timeout)[0]:
            now = ray.get(worker.progress.options(concurrency_group=WATCH).remote(), timeout=min(_ALIVE_S, timeout))
            if now == before:
                raise ray.exceptions.GetTimeoutError(f"no token for {timeout} seconds")
            before, timeout = now, self._policy.stall_timeout_s


def launch(plan: Plan, *, fault_policy: FaultPolicy | None = None, address: str | None = None) -> Deployment:
    """Start every worker of a plan.

    ``address`` of a Ray cluster; None: the one this process is connected to, else one that is started here with the
    plan's cores. On a host without Neuron the same workers run on the CPU and cores are file locks.

    Raises:
        PlanError: a model cannot be run as it was planned, there is no such cluster, or it has no room.
        WorkerError: a worker did not start.
    """
    planner.check(plan)
    if not ray.is_initialized():
        connect(address, cores=plan.instance.cores)
    return Deployment(plan, fault_policy or FaultPolicy()).start()


def _start(groups: Sequence[WorkerGroup]) -> None:
    """All at once, since loading takes longest; if one cannot start, none of them is left."""
    try:
        for group in groups:
            group.launch()
        for group in groups:
            group.wait_ready()
    except BaseException:
        _stop(groups)
        raise


def _stop(groups: Sequence[WorkerGroup]) -> None:
    """Every one of them, though another cannot be ended as it should."""
    with ExitStack() as stack:
        for group in groups:
            stack.callback(group.stop)


def groups_of(plan: Plan) -> list[list[Placement]]:
    """Placements that belong together: targets connected by drafts they share."""
    groups: list[list[Placement]] = []
    for item in plan.placements:
        members = {(item.name, item.replica)} | set(item.drafts_for)
        linked = [g for g in groups if any(members & ({(p.name, p.replica)} | set(p.drafts_for)) for p in g)]
        groups = [g for g in groups if g not in linked] + [[item, *(p for g in linked for p in g)]]
    return groups


def _value(reference: ray.ObjectRef) -> TokenDelta:
    """A piece; an error of ours as what it is."""
    try:
        delta: TokenDelta = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception) and type(cause).__module__.startswith("paceline."):
            raise cause from error
        raise
    return delta


_POLL_S = 1.0  # between looks at a node's health


@dataclass(slots=True)
class Worker:
    """A worker of a group; ``process`` is known once it is ready."""

    spec: WorkerSpec
    actor: ray.actor.ActorHandle
    process: Process | None = None


class Changes:
    """Which workers are just being started or ended: by one thread at a time, while others wait for them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._changing: set[str] = set()
        self._stopped = False

    @contextmanager
    def change(self, labels: frozenset[str]) -> Iterator[None]:
        """No other thread starts or ends these workers meanwhile. Raises WorkerError if the group was stopped."""
        with self._condition:
            self._condition.wait_for(lambda: self._changing.isdisjoint(labels))
            self._refuse_stopped(labels)
            self._changing |= labels
        try:
            yield
        finally:
            with self._condition:
                self._changing -= labels
                self._condition.notify_all()

    @contextmanager
    def settled(self, label: str) -> Iterator[None]:
        """With the lock, once no thread is starting or ending that worker."""
        with self._condition:
            self._condition.wait_for(lambda: label not in self._changing)
            yield

    @contextmanager
    def running(self, label: str) -> Iterator[None]:
        """With the lock. Raises WorkerError if the group was stopped."""
        with self._condition:
            self._refuse_stopped({label})
            yield

    @contextmanager
    def stop(self) -> Iterator[Callable[[], None]]:
        """With the lock; nothing changes any more after what this yields was called, which waits for other threads."""
        with self._condition:
            self._stopped = True

            def wait_for_others() -> None:
                self._condition.wait_for(lambda: not self._changing)

            yield wait_for_others

    def _refuse_stopped(self, labels: set[str] | frozenset[str]) -> None:
        if self._stopped:
            raise WorkerError(f"{', '.join(sorted(labels))} was stopped; launch the plan again to use it")


class WorkerGroup:
    """Workers that live and move together. ``existing``: the caller's placement group, from its bundle ``offset`` on;
    such a group does not move.

    Ray's placement group keeps them on a node and counts their cores; the core allocator says which cores. Drafts
    are restarted by Ray, in place. A target is restarted here, in place if its node lives, else the whole group
    moves to another node.
    """

    def __init__(
        self,
        instance: Instance,
        placements: Sequence[Placement],
        fault_policy: FaultPolicy,
        *,
        existing: PlacementGroup | None = None,
        offset: int = 0,
    ) -> None:
        # Drafts first: a target calls its draft as soon as it is made.
        self.placements = sorted(placements, key=lambda item: item.role != "draft")
        self._policy, self._moves_itself = fault_policy, existing is None
        self._reservation = Reservation(instance, self.placements, fault_policy, existing=existing, offset=offset)
        self._labels = frozenset(item.label for item in self.placements)
        self._changes = Changes()
        self._specs: dict[str, WorkerSpec] = {}
        self._workers: dict[str, Worker] = {}
        self._launched = False
        self.moves = self.restarts = 0

    @property
    def targets(self) -> list[str]:
        """Labels of the targets."""
        return [item.label for item in self.placements if item.role == "target"]

    def actor(self, label: str) -> ray.actor.ActorHandle:
        """The worker of that label; one that is just being brought back is waited for. A group that could not be moved
        when its node died is started again now, for there may be room meanwhile.

        Raises:
            PlanError: there is none.
            WorkerError: it could not be brought back, or was stopped.
        """
        with self._changes.settled(label):
            if label in self._workers:
                return self._workers[label].actor
            if not (self._moves_itself and self._launched):
                raise WorkerError(f"{label} does not run; it was stopped, or could not be started again")
        return self._relaunch(label)

    def spec(self, label: str) -> WorkerSpec:
        """What that worker is."""
        return self._specs[label]

    @property
    def cores(self) -> dict[str, CoreRange]:
        """Label -> cores it really has, of the workers that run."""
        return {label: spec.cores for label, spec in self._specs.items()}

    # ---- starting

    def launch(self) -> None:
        """Find a node, take cores, and have every worker begin to load.

        Raises:
            PlanError: no node has room; nothing is left then.
            WorkerError: a worker did not start, or the group was stopped; nothing is left then.
        """
        with self._changes.change(self._labels):
            self._launch()

    def wait_ready(self) -> None:
        """Wait until all are ready. Raises as `launch`."""
        with self._changes.change(self._labels):
            self._wait_ready()

    def _launch(self) -> None:
        with self._or_nothing():
            self._specs = self._reservation.acquire()
            for item in self.placements:
                self._spawn(self._specs[item.label], role=item.role)

    def _wait_ready(self) -> None:
        with self._or_nothing():
            self._await([item.label for item in self.placements])
            self._reservation.confirm(self._specs.values())
            self._launched = True

    def _relaunch(self, label: str) -> ray.actor.ActorHandle:
        """Start a group of which nothing is left; another caller may have done so."""
        with self._changes.change(self._labels):
            if label not in self._workers:
                self.moves += 1
                self._launch()
                self._wait_ready()
            return self._workers[label].actor

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """What fails in here leaves no worker behind."""
        try:
            yield
        except ray.exceptions.RayError as error:
            self._clear()
            raise WorkerError(f"{', '.join(sorted(self._labels))} did not start: {error}") from error
        except BaseException:
            self._clear()
            raise

    def _spawn(self, spec: WorkerSpec, *, role: str) -> None:
        """Have a worker begin to load, unless the group was stopped: nothing would end it then."""
        options = {
            "name": spec.actor,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "resources": {RESOURCE: len(spec.cores)},
            "max_restarts": -1 if role == "draft" else 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": environment.for_actor(spec.env)},
            "scheduling_strategy": self._reservation.bundle(spec.label),
        }
        if role == "draft":
            remote_class = ray.remote(DraftWorker)
        else:
            remote_class = ray.remote(concurrency_groups={WATCH: 2}, max_concurrency=STREAMS)(TargetWorker)
        with self._changes.running(spec.label):
            self._workers[spec.label] = Worker(spec, remote_class.options(**options).remote(spec))

    def _await(self, labels: Sequence[str]) -> None:
        """Until these workers are ready; no longer than their node lives."""
        workers, names = [self._workers[label] for label in labels], ", ".join(labels)
        pending = [worker.actor.ready.remote() for worker in workers]
        deadline = monotonic() + self._policy.startup_timeout_s
        waiting = list(pending)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            try:
                ray.get(done)  # one that failed is told at once, though others still load
            except ray.exceptions.RayError as error:
                raise WorkerError(f"{names} did not start: {error}") from error
            if waiting and monotonic() > deadline:
                raise WorkerError(
                    f"{names} did not start within {self._policy.startup_timeout_s} seconds; raise "
                    "fault_policy.startup_timeout_s"
                )
            if waiting and not self._nodes_live():
                raise WorkerError(f"the node of {names} died while they started; start them again")
        answers: list[Ready] = ray.get(pending)
        for worker, ready in zip(workers, answers, strict=True):
            worker.process = ready.process

    # ---- restarting and stopping

    def restart(self, label: str, seen: ray.actor.ActorHandle, *, hung: bool = False) -> None:
        """Bring a dead or hung target back: on its cores if its node lives, else the whole group somewhere else.

        Nothing is done if another caller brought back the worker ``seen`` already. Other targets go on meanwhile,
        unless the group moves.

        Raises:
            PlanError: no node has room.
            WorkerError: it does not start, or the group was stopped.
        """
        reason: PlacementError | None = None
        with self._changes.change(frozenset([label])):
            if not self._is(label, seen):
                return
            worker = self._workers[label]
            with self._changes.running(label):
                self.restarts += 1
            _kill(seen)
            process, worker.process = worker.process, None
            if self._nodes_live():
                try:
                    if hung and process is not None:
                        nodes.kill(worker.spec.node, process)
                    self._respawn(label)
                    return
                except PlacementError as error:
                    reason = error
            last = self._workers[label].actor
        with self._changes.change(self._labels):
            if not self._is(label, last):  # another caller moved the group
                return
            if not self._moves_itself:
                what = "died with its node" if reason is None else f"could not be started again ({reason})"
                raise WorkerError(
                    f"{label} {what}; the owner of its placement group has to start the group again"
                ) from reason
            self.moves += 1
            self._clear()
            self._launch()
            self._wait_ready()

    def _is(self, label: str, actor: ray.actor.ActorHandle) -> bool:
        return label in self._workers and self._workers[label].actor is actor

    def _respawn(self, label: str) -> None:
        """A new worker in the place of a dead one."""
        spec = self._specs[label] = self._reservation.replace(self._specs[label])
        self._spawn(spec, role="target")
        self._await([label])
        self._reservation.confirm([spec])

    def _nodes_live(self) -> bool:
        return all(map(nodes.lives, {spec.node for spec in self._specs.values()}))

    def stop(self) -> None:
        """End every worker for good and give everything back, also while another thread brings one back."""
        with self._changes.stop() as wait_for_others:
            for worker in self._workers.values():  # a thread that waits for one to be ready hears of it at once
                _kill(worker.actor)
            wait_for_others()
            self._clear()

    def _clear(self) -> None:
        """End every worker and give everything back."""
        for worker in self._workers.values():
            _kill(worker.actor)
        self._reservation.release()
        for spec in self._specs.values():
            if spec.address is not None and spec.address.path:
                Path(spec.address.path).unlink(missing_ok=True)
        self._workers, self._specs = {}, {}


def _kill(actor: ray.actor.ActorHandle) -> None:
    with suppress(ray.exceptions.RayError):
        ray.kill(actor)
