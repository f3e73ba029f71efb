"""Replica of one model, as a deployment of Ray Serve: its process runs the target; a draft with its own cores runs in a
separate process.

Ray Serve starts replicas, chooses one for a request, checks their health, and replaces them; the router resends lost
requests (`paceline.serving.serve_router`). Cores come from the core allocator, before this module initialises a runtime
(`paceline.placement.cluster.replica_group`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from paceline.core.errors import CheckpointError, RankError, WorkerError
from paceline.draft_checks import recognise
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import RESOURCE, host_names
from paceline.placement.cluster.roles import maker
from paceline.placement.host import environment
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.errors import UNAVAILABLE, RefusedError
from paceline.serving.lifecycle import ModelUsage
from paceline.serving.metrics import MetricSet, RequestTimes
from paceline.serving.openai.requests import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.ray_guard import SERVE_LOGGING, Readers, watch_cluster, write_with_serve
from paceline.serving.router import (
    Failed,
    GenerationRequest,
    Item,
    ModelCard,
    PlacedModel,
    RequestContext,
    StreamStart,
)
from paceline.serving.serve_router import deployment_name

if TYPE_CHECKING:
    from paceline.placement.cluster.replica_group import ReplicaGroup
    from paceline.placement.cluster.worker_spec import WorkerSpec
    from paceline.workers.shared_engine import SharedEngine

log = logging.getLogger("paceline")

SHUTDOWN_S = 60.0  # for current responses when the service is taken down
CPU_SHARE = 0.01  # of a host CPU, as Serve counts it, for each process
DEPLOYED: dict[str, Any] = {
    "max_ongoing_requests": 1 << 20,  # that Serve passes to a process concurrently: the engine limits them
    "graceful_shutdown_timeout_s": SHUTDOWN_S,
    "health_check_period_s": 2.0,  # three missed checks in a row: a suspended process is replaced after 24 s
    "health_check_timeout_s": 6.0,
    "logging_config": SERVE_LOGGING,
}
"""Options of every deployment."""

_FIRST_REQUEST_S = 2.0  # in which the request arrives for which a model was loaded


class ModelReplica:
    """Server of one target. ``by_ids``: requests come from a program, so that a tokenizer may be missing."""

    def __init__(
        self,
        group: ReplicaGroupPlan,
        fault_policy: FaultPolicy,
        max_waiting: int | None = None,
        *,
        by_ids: bool = False,
    ) -> None:
        # Imported late: the ingress and lifecycle processes import this module to deploy it, and decode nothing.
        from paceline.placement.cluster.replica_group import ReplicaGroup
        from paceline.serving.model_server import ModelServer, NoTokenizer
        from paceline.text.tokenizer import load_tokenizer

        write_with_serve()
        watch_cluster()  # before anything waits for the allocator
        bundles = ray.util.get_current_placement_group()
        if bundles is None:
            raise WorkerError(f"{group.name} has no placement group; deploy it with paceline.serving.ray_app")
        plan = group.plan
        self._policy, self._num_slots = fault_policy, plan.placements[0].model.options.slots
        self._group = ReplicaGroup(plan.instance, plan.placements, fault_policy, bundles=bundles)
        try:
            self._drafter = self._group.drafter()
            settings, drafter = self._group.spec.settings, self._drafter
            make = cast("Callable[..., SharedEngine]", maker(self._group.spec.maker))
            self._engine = self._group.wait_ready(lambda: make(settings, drafter, max_waiting=max_waiting))
            try:
                tokenizer = load_tokenizer(Path(str(plan.placements[0].model.folder)))
            except CheckpointError as error:
                if not by_ids:
                    raise
                tokenizer = NoTokenizer(error)
        except BaseException:
            self._group.close()
            raise
        card = model_card(group, self._engine, self._group.workers)
        self._server = ModelServer(tokenizer, self._engine, self._engine.generator.limits, card=card)
        self._metrics = MetricSet(group.name, serve.get_replica_context().replica_id.unique_id)
        self._beat = _Heartbeat(fault_policy.stall_timeout_s)
        self._readers, self._requests = Readers(), _Requests()

    async def stream(
        self, request: GenerationRequest, context: RequestContext, skip: Sequence[int] = ()
    ) -> AsyncIterator[Item | tuple[Item, ...]]:
        """Stream a response. Items that are ready together are one message, and the stream ends when its reader has
        taken them.
        """
        if not self._requests.begin():
            message = "this model is being unloaded; send the request again"
            yield Failed(RefusedError(503, message, code=UNAVAILABLE, retry_after_s=1.0), lost=True)
            return
        try:
            times, begun = RequestTimes(self._metrics, resumed=bool(skip)), tuple[Item, ...]()
            async with aclosing(self._server.stream(request, context, skip)) as items:  # type: ignore[type-var]
                async for item in items:
                    times.take(item)
                    if isinstance(item, StreamStart) and item.followed:
                        begun = (item,)
                        continue
                    yield (*begun, item) if begun else item
                    begun = ()
        finally:
            self._requests.end()
        await self._readers.taken(context.reader)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        return await self._server.tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        return await self._server.detokenize(request)

    async def describe(self) -> ModelCard:
        """Return the model's card. A replica that returns it can serve requests."""
        self._check()
        if self._requests.leaving:
            raise WorkerError("this model is being unloaded; send the request again")
        return self._server.card

    async def usage(self) -> ModelUsage:
        return self._requests.usage

    async def leave(self, unless_used: bool) -> bool:
        """Reject new requests, since the model is to be unloaded. With ``unless_used``: return False and change nothing
        if it has requests, or may have one at once.
        """
        if unless_used and self._requests.usage.running:
            return False
        self._requests.leaving = True
        return True

    async def stay(self) -> None:
        """Accept requests again: the model is not unloaded after all."""
        self._requests.leaving = False

    async def metrics_text(self) -> str:
        health = None if self._drafter is None else self._drafter.health
        self._metrics.update(self._engine.figures(), health, num_slots=self._num_slots)
        self._metrics.finished(self._engine.take_timings())
        return self._metrics.text()

    async def statistics(self) -> dict[str, object]:
        return self._engine.generator.statistics.to_dict()

    async def progress(self) -> int:
        """A number that grows while any request is served."""
        return self._engine.heartbeat

    async def check_health(self) -> None:
        """Answer Serve's health check; a replica that raises, or does not respond, is replaced."""
        self._check()

    def _check(self) -> None:
        """Raise WorkerError if no round succeeds, or one does not end."""
        failure = self._engine.failure
        if isinstance(failure, RankError):
            log.error("a rank of the model failed; this replica exits so that Ray Serve replaces it", exc_info=failure)
            os._exit(1)  # its processes cannot be reconnected
        if failure is not None:
            raise WorkerError(
                f"the model's rounds fail repeatedly ({type(failure).__name__}: {failure}); see the replica's log"
            ) from failure
        figures = self._engine.figures()
        self._beat.check(self._engine.heartbeat, busy=figures.running + figures.waiting > 0)

    def __del__(self) -> None:
        group: ReplicaGroup | None = self.__dict__.get("_group")
        if group is not None:
            group.close()


class _Requests:
    """Requests of a replica. ``leaving``: it accepts no more."""

    def __init__(self) -> None:
        self._running, self._since, self._is_new = 0, time.monotonic(), True
        self.leaving = False

    @property
    def usage(self) -> ModelUsage:
        """Current usage. A newly loaded model counts as used until its first request, for up to `_FIRST_REQUEST_S`."""
        idle_s = time.monotonic() - self._since
        about_to = int(self._is_new and idle_s < _FIRST_REQUEST_S)
        return ModelUsage(self._running or about_to, 0.0 if self._running else idle_s)

    def begin(self) -> bool:
        """Add a request. False: it is rejected."""
        if self.leaving:
            return False
        self._running += 1
        self._is_new = False
        return True

    def end(self) -> None:
        self._running -= 1
        self._since = time.monotonic()


class _Heartbeat:
    """Detects an engine with requests that makes no progress. ``timeout_s``: maximum seconds without progress."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._count, self._since = timeout_s, -1, time.monotonic()

    def check(self, count: int, *, busy: bool) -> None:
        now = time.monotonic()
        if count != self._count or not busy:
            self._count, self._since = count, now
        elif now - self._since > self._timeout_s:
            raise WorkerError(
                f"the engine has done nothing for {self._timeout_s} seconds although requests wait; see the "
                "replica's log"
            )


def model_card(group: ReplicaGroupPlan, engine: SharedEngine, workers: Sequence[WorkerSpec]) -> ModelCard:
    model, *drafts = (item.model for item in group.plan.placements)
    methods = ("model",) * len(drafts) or tuple(
        draft.name or recognise(str(draft.path)) for draft in model.speculative.draft
    )
    hosts = host_names()
    return ModelCard(
        group.name,
        int(time.time()),
        max_model_len=engine.generator.limits.n_positions,
        methods=methods,
        drafters=engine.generator.limits.drafters,
        num_spec_tokens=engine.generator.drafter.draft_shape.num_draft_tokens,
        placement=tuple(
            PlacedModel(
                spec.label,
                "draft" if spec.link is None and spec.address else "target",
                spec.node,
                tuple(spec.cores.cores),
                hosts.get(spec.node, ""),
            )
            for spec in workers
        ),
    )


def model_deployment(group: ReplicaGroupPlan, fault_policy: FaultPolicy, *, by_ids: bool = False) -> serve.Application:
    """Return the deployment of a model, with the number of replicas in its file. ``by_ids``: see `ModelReplica`."""
    target, *drafts = group.num_cores
    max_waiting = group.plan.placements[0].model.max_waiting  # more requests are answered with 429
    threads, scaling = dict(group.plan.placements[0].env)["OMP_NUM_THREADS"], group.residency.autoscaling
    idle_s = group.residency.idle_ttl_s
    replicas: dict[str, Any] = {"num_replicas": group.replicas}
    if scaling is not None:
        idle = {} if idle_s is None else {"downscale_to_zero_delay_s": idle_s}
        replicas = {"autoscaling_config": AutoscalingConfig(**scaling.model_dump(), **idle)}
    variables = {**environment.without_cores(), environment.NOSET: "1", "OMP_NUM_THREADS": threads}
    deployment = serve.deployment(
        ModelReplica,
        name=deployment_name(group.name),
        **replicas,
        max_queued_requests=max_waiting,
        **DEPLOYED,
        ray_actor_options={
            "num_cpus": CPU_SHARE,
            "resources": {RESOURCE: target},
            "runtime_env": {"env_vars": variables},
        },
        placement_group_bundles=[
            {"CPU": CPU_SHARE, RESOURCE: float(target)},
            *({RESOURCE: float(cores)} for cores in drafts),
        ],
        placement_group_strategy="STRICT_PACK" if fault_policy.colocate else "PACK",
    )
    return deployment.bind(group, fault_policy, max_waiting, by_ids=by_ids)
