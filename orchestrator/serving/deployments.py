"""A model as a deployment of Ray Serve: its resources, its placement, how many replicas it has, and the routes to them.

A replica is a replica group (`paceline.placement.planning.groups`): the process that runs the target, and its draft if
that has cores of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ray import serve
from ray.serve.config import AutoscalingConfig

from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.reservation import RESOURCE
from paceline.placement.host import environment
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.logs import SERVE_LOGGING
from paceline.serving.replica import ModelReplica
from paceline.serving.serve_router import ModelRoute, ServeRouter

SHUTDOWN_S = 60.0  # for answers that are under way when the service is taken down
CPU_SHARE = 0.01  # of a host CPU, as Serve counts it, for each process
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 6.0  # three silences in a row: a stopped process is replaced after 24 s
UNBOUNDED = 1 << 20  # requests that Serve passes on to a process at the same time: it is the engine that bounds them


def deployment_name(model: str) -> str:
    """Of a model's deployment."""
    return f"model-{model}"


def model_deployment(group: ReplicaGroupPlan, fault_policy: FaultPolicy, *, by_ids: bool = False) -> serve.Application:
    """A model, with as many replicas as its file asks for. ``by_ids``: see `ModelReplica`."""
    target, *drafts = group.num_cores
    max_waiting = group.plan.placements[0].model.max_waiting  # more requests are answered with 429
    threads, scaling = dict(group.plan.placements[0].env)["OMP_NUM_THREADS"], group.residency.autoscaling
    variables = {**environment.without_cores(), environment.NOSET: "1", "OMP_NUM_THREADS": threads}
    deployment = serve.deployment(
        ModelReplica,
        name=deployment_name(group.name),
        **({"num_replicas": group.replicas} if scaling is None else {"autoscaling_config": _autoscaling(group)}),
        max_ongoing_requests=UNBOUNDED,
        max_queued_requests=max_waiting,
        graceful_shutdown_timeout_s=SHUTDOWN_S,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config=SERVE_LOGGING,
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


def _autoscaling(group: ReplicaGroupPlan) -> AutoscalingConfig:
    residency = group.residency
    scaling = residency.autoscaling
    assert scaling is not None
    idle = {} if residency.idle_ttl_s is None else {"downscale_to_zero_delay_s": residency.idle_ttl_s}
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        target_ongoing_requests=scaling.target_ongoing_requests,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        **idle,
    )


@dataclass(frozen=True, slots=True)
class Service:
    """The models of one application of Ray Serve, as a process has to know them.

    application  its name
    groups       of all models, by name
    """

    application: str
    groups: Mapping[str, ReplicaGroupPlan]
    fault_policy: FaultPolicy

    def own_application(self, name: str) -> str:
        """That of a model which is loaded on demand."""
        return f"{self.application}-{name}"

    def route(self, name: str) -> ModelRoute:
        """To a model that is deployed."""
        own = self.own_application(name) if self.groups[name].is_on_demand else self.application
        return ModelRoute(serve.get_deployment_handle(deployment_name(name), own))


class Routes:
    """Keeps a router's routes as the owner says: to models on demand while they are loaded."""

    def __init__(self, service: Service, router: ServeRouter) -> None:
        self._service, self._router = service, router
        self._loaded: Collection[str] | None = None

    def follow(self, loaded: Collection[str]) -> None:
        """These are loaded now."""
        for name, group in self._service.groups.items():
            before = self._loaded is not None and name in self._loaded
            if before != (name in loaded):
                if not group.is_on_demand:
                    self._router.forget(name)
                elif before:
                    self._router.remove(name)
                else:
                    self._router.put(name, self._service.route(name))
        self._loaded = frozenset(loaded)
