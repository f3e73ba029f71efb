"""`launch(plan)`: the models of a plan on Ray Serve without HTTP, called with token ids from this process.

    with launch(plan) as models:
        for piece in models.stream("chat", [ids], max_new_tokens=64): ...

They are the replicas of `paceline serve`, called through the same router. Each target is a separate application, so
that it can be stopped and added while others run.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from ray.util.placement_group import placement_group, remove_placement_group

from paceline.core.errors import ConfigurationError, PlanError, QueueFullError, TargetLostError, WorkerError
from paceline.placement.cluster.core_allocator import call_allocator, end_unused
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import RAY_ERRORS, RESOURCE, connect
from paceline.placement.host import environment
from paceline.placement.planning import planner
from paceline.placement.planning.core_range import CoreRange, Fragmentation
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.placement.planning.plan import Plan
from paceline.placement.planning.residency import Residency
from paceline.serving.answer import read_outputs
from paceline.serving.errors import QUEUE_FULL, RefusedError
from paceline.serving.ray_guard import handle_of, running_address
from paceline.serving.replica import model_deployment
from paceline.serving.router import Failed, Item, RequestContext, StreamChunk, TokenRequest
from paceline.serving.serve_router import ServeRouter, deployment_name

if TYPE_CHECKING:
    from paceline.engine.request import SamplingParams
    from paceline.outputs import RequestOutput

_CALL_S = 30.0
_LOOK_S = 0.1  # between checks of starting models
_RAY_ERRORS = (*RAY_ERRORS, RayServeException)  # errors of Ray and Serve

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class _Launched:
    group: ReplicaGroupPlan
    application: str  # its name in Serve


class Deployment:
    """Running models. Context manager: leaving it ends them all."""

    def __init__(self, plan: Plan, fault_policy: FaultPolicy) -> None:
        self.plan, self._policy = plan, fault_policy
        self._launched: dict[str, _Launched] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="paceline-calls")
        self._thread.start()
        wait_s = fault_policy.startup_timeout_s
        self._router = ServeRouter({}, recovery_s=wait_s, resume_s=wait_s)
        self._serve_is_ours = False

    @property
    def models(self) -> list[str]:
        """Labels of the targets that run."""
        return list(self._launched)

    def stream(
        self, model: str, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, **overrides: object
    ) -> Stream:
        """Continue prompts; one output for each request and round.

        ``params``: `paceline.SamplingParams`; ``overrides`` replace some of its fields, or give them without it.
        Several calls, from several threads too, share a target's rounds; those without a free slot wait for one.

        Raises:
            ConfigurationError: no such target runs, or a parameter cannot be sent to another process.
            RequestError: the request cannot be served.
            QueueFullError: the queue is full (``max_waiting`` requests wait).
            TargetLostError: the target was lost and is not back within ``FaultPolicy.startup_timeout_s``; has the
                tokens so far.
        """
        from paceline.workers.calls import call_params

        self._known(model)
        ids = tuple(tuple(prompt) for prompt in prompts)
        request = TokenRequest(model, ids, call_params(params, overrides))
        return Stream(self._router.stream(request, RequestContext.new()), self._loop, len(ids))

    def sample(
        self, model: str, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None, **overrides: object
    ) -> list[list[int]]:
        """Return the full sequences, prompts included; errors as of `stream`."""
        texts = [list(prompt) for prompt in prompts]
        for piece in self.stream(model, prompts, params, **overrides):
            texts[piece.index] += piece.tokens
        return texts

    def statistics(self, model: str) -> Mapping[str, Any]:
        """Return the statistics of a target since it was last idle, including its drafter's health.

        Raises:
            ConfigurationError: no such target runs.
        """
        self._known(model)
        return self._do(self._router.ask(model, "statistics"))

    def fragmentation(self) -> dict[str, Fragmentation]:
        """Return node -> its free cores and their fragmentation."""
        return call_allocator("report", timeout=_CALL_S)  # type: ignore[no-any-return]

    def cores(self) -> dict[str, CoreRange]:
        """Return label -> assigned cores, of all running processes."""
        cards = [card for model in self.models for card in self._do(self._router.cards(model))]
        return {one.name: CoreRange(one.cores[0], one.cores[-1]) for card in cards for one in card.placement}

    def stop(self, model: str) -> None:
        """End one target and its draft; raise ConfigurationError if no such target runs."""
        launched = self._known(model)
        del self._launched[model]
        self._loop.call_soon_threadsafe(self._router.remove, model)
        serve.delete(launched.application)

    def add(self, plan: Plan) -> None:
        """Start the models of another plan alongside the running ones; cores in use are replaced by free ones.

        Raises:
            PlanError: a model of that name runs, a model cannot be run as it was planned, or not enough cores are free.
            WorkerError: a model did not start; then none of the plan is running.
        """
        running = {item.label for one in self._launched.values() for item in one.group.plan.placements}
        twice = next((item.label for item in plan.placements if item.label in running), None)
        if twice is not None:
            raise PlanError(f"{twice} already runs; stop it, or add the other one under another name")
        planner.check(plan)
        groups = groups_of(plan)
        _check_room(groups, self._policy)
        stamp = secrets.token_hex(4)
        started = {group.name: _Launched(group, f"launched-{group.name}-{stamp}") for group in groups}
        try:
            self._start(list(started.values()))
        except BaseException:
            for one in started.values():
                with suppress(*_RAY_ERRORS):
                    serve.delete(one.application)
            raise
        self._launched |= started

    def close(self) -> None:
        """End all models, and Serve and the core allocator too if nothing else uses them."""
        launched, self._launched = self._launched, {}
        try:
            for one in launched.values():
                serve.delete(one.application)
            if self._serve_is_ours and not serve.status().applications:
                serve.shutdown()
        finally:
            if not self._loop.is_closed():
                self._do(_cancel_others())
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
            end_unused(_CALL_S)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, model: str) -> _Launched:
        if model not in self._launched:
            raise ConfigurationError(
                f"model: expected one of {', '.join(self.models)}, got {model!r}; correct the name"
            )
        return self._launched[model]

    def _start(self, started: Sequence[_Launched]) -> None:
        try:
            self._serve_is_ours |= running_address() is None
            serve.start(proxy_location=ProxyLocation.Disabled)
            serve.run_many(
                [
                    serve.RunTarget(
                        model_deployment(one.group, self._policy, by_ids=True), name=one.application, route_prefix=None
                    )
                    for one in started
                ],
                wait_for_applications_running=False,
            )
            self._wait(started)
        except _RAY_ERRORS as error:
            raise WorkerError(
                f"{', '.join(one.group.name for one in started)} did not start ({error}); see the logs of its workers"
            ) from error
        for one in started:
            handle = handle_of(deployment_name(one.group.name), one.application)
            self._loop.call_soon_threadsafe(self._router.put, one.group.name, handle)

    def _wait(self, started: Sequence[_Launched]) -> None:
        end = monotonic() + self._policy.startup_timeout_s
        waiting = list(started)
        while waiting:
            states = serve.status().applications
            for one in waiting:
                state = states[one.application]
                if state.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                    why = "; ".join(each.message for each in state.deployments.values()) or state.message
                    raise WorkerError(f"{one.group.name} did not start ({why}); see the logs of its workers")
            waiting = [one for one in waiting if states[one.application].status != ApplicationStatus.RUNNING]
            if waiting and monotonic() > end:
                names = ", ".join(one.group.name for one in waiting)
                raise WorkerError(
                    f"{names} did not start within {self._policy.startup_timeout_s} seconds; raise "
                    "fault_policy.startup_timeout_s"
                )
            sleep(_LOOK_S)

    def _do(self, work: Coroutine[Any, Any, Value]) -> Value:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Stream:
    """Outputs of a call, as they arrive. ``close`` may be called from any thread, while another waits for one."""

    def __init__(self, items: AsyncIterator[Item], loop: asyncio.AbstractEventLoop, num_requests: int) -> None:
        self._items, self._loop = items, loop
        self._tokens: list[list[int]] = [[] for _ in range(num_requests)]
        self._ready: deque[RequestOutput] = deque()
        self._step: Future[Item | None] | None = None
        self._over = False

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        while not self._ready:
            if self._over:
                raise StopIteration
            self._take()
        output = self._ready.popleft()
        self._tokens[output.index] += output.tokens
        return output

    def close(self) -> None:
        """Abort the call; its remaining outputs are dropped."""
        self._over = True
        self._ready.clear()
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def __del__(self) -> None:
        if not self._over:
            self.close()

    def _take(self) -> None:
        self._step = asyncio.run_coroutine_threadsafe(_next(self._items), self._loop)
        try:
            item = self._step.result()
        except CancelledError:
            if self._over:
                return
            item = Failed(RefusedError(503, "the models were stopped; launch them again"), lost=True)
        if item is None or item.last:
            self._over = True
        if isinstance(item, Failed):
            raise self._error(item)
        if isinstance(item, StreamChunk):
            self._ready.extend(read_outputs(item.data))

    async def _end(self) -> None:
        if self._step is not None and not self._step.done():
            self._step.cancel()
            await asyncio.sleep(0)  # for the item's task to end
        with suppress(Exception):  # any error; no caller waits for it
            await self._items.aclose()  # type: ignore[attr-defined]

    def _error(self, failed: Failed) -> Exception:
        if failed.error.code == QUEUE_FULL:
            return failed.cause or QueueFullError(failed.error.message)
        if failed.cause is not None and not failed.lost:
            return failed.cause
        return TargetLostError(
            f"{failed.error.message}; `tokens` has what was generated, and the same request with the same seed gives "
            "the same tokens again",
            tuple(map(tuple, self._tokens)),
        )


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _next(items: AsyncIterator[Item]) -> Item | None:
    return await anext(items, None)


def launch(plan: Plan, *, fault_policy: FaultPolicy | None = None, address: str | None = None) -> Deployment:
    """Start every model of a plan.

    ``address``: of a Ray cluster; None: the one this process is connected to, else a new one on this machine with the
    plan's cores. On a host without Neuron the same processes run on the CPU and cores are file locks.

    Raises:
        PlanError: a model cannot be run as it was planned, there is no such cluster, or it lacks free cores.
        WorkerError: a model did not start.
    """
    planner.check(plan)
    if not ray.is_initialized():
        environment.prepare_new_cluster()
        connect(address, cores=plan.instance.cores)
    deployment = Deployment(plan, fault_policy or FaultPolicy())
    try:
        deployment.add(plan)
    except BaseException:
        deployment.close()
        raise
    return deployment


def groups_of(plan: Plan) -> list[ReplicaGroupPlan]:
    groups = []
    for target in plan.placements:
        if target.role == "target":
            own = (target.name, target.replica)
            drafts = tuple(item for item in plan.placements if own in item.drafts_for)
            alone = replace(target, model=replace(target.model, replicas=1, residency=Residency()))
            groups.append(ReplicaGroupPlan(target.label, 1, Plan(plan.instance, (alone, *drafts))))
    return groups


def _check_room(groups: Sequence[ReplicaGroupPlan], fault_policy: FaultPolicy) -> None:
    """Raise PlanError if no node has enough cores for a group. Serve would silently wait for one."""
    strategy = "STRICT_PACK" if fault_policy.colocate else "PACK"
    asked = [
        placement_group([{RESOURCE: float(cores)} for cores in group.num_cores], strategy=strategy) for group in groups
    ]
    end = monotonic() + fault_policy.placement_timeout_s
    try:
        for group, room in zip(groups, asked, strict=True):
            if not room.wait(max(0.1, end - monotonic())):
                raise PlanError(
                    f"no node of the cluster has {sum(group.num_cores)} free {RESOURCE} for {group.name} and its "
                    "draft; stop a model, add a node, let drafts run on other nodes than their targets "
                    "(fault_policy.colocate: false), or start Ray's nodes with that resource"
                )
    finally:
        for room in asked:
            remove_placement_group(room)
