"""`launch(plan)`: a plan becomes running workers, and requests go to them.

    with launch(plan) as models:
        for piece in models.stream("chat", [ids], max_new_tokens=64): ...

The caller's process only hands out requests and collects tokens, one message a round. It also notices that a target
died, restarts it, and lets the new one read what was emitted, so that the same tokens go on.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import ray

from paceline.core.errors import ConfigurationError, PlacementError, PlanError, TargetLostError
from paceline.placement.cluster.actors import WATCH
from paceline.placement.cluster.calls import Call, Stream
from paceline.placement.cluster.core_allocator import call_allocator, end_unused
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.cluster.roles import CALL_PARAMS, Settings, TokenDelta, maker
from paceline.placement.cluster.worker_group import RESOURCE, WorkerGroup
from paceline.placement.planning import validate_plan
from paceline.placement.planning.core_range import CoreRange, Fragmentation
from paceline.placement.planning.plan import Placement, Plan

_NEW_CLUSTER = "local"  # even if another one runs on this machine
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
        validate_plan.check(plan)
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
        PlanError: a model cannot be run as it was planned, or the cluster has no room.
        WorkerError: a worker did not start.
    """
    validate_plan.check(plan)
    if not ray.is_initialized():
        own = {} if address else {"resources": {RESOURCE: plan.instance.cores}, "include_dashboard": False}
        ray.init(address=address or _NEW_CLUSTER, namespace=NAMESPACE, log_to_driver=False, **own)
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
