"""From a models file to a Serve application: one deployment for each group of targets and their drafts.

`build` is a builder for `serve deploy`:

    applications:
      - name: paceline
        route_prefix: /
        import_path: paceline.serving.app:build
        args: {models: /path/models.yaml, instance: inf2.48xlarge}

`deploy_config` writes that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ray import serve

from paceline.core.errors import ConfigurationError
from paceline.placement import Plan, instance, plan, read_fault_policy, read_models
from paceline.placement.cluster.actors import STREAMS
from paceline.placement.cluster.deployment import groups_of
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.worker_group import RESOURCE
from paceline.placement.planning import validate_plan
from paceline.placement.planning.detect import detect
from paceline.placement.planning.plan import Placement
from paceline.serving.ingress import Ingress, ModelRoute
from paceline.serving.replica import Replica

_ARGUMENTS = frozenset({"models", "instance"})
_SHUTDOWN_S = 60.0  # to end the workers and give back their cores; Serve's 20 are few on a busy machine
_CPU_SHARE = 0.01  # of a host CPU, as Serve counts it, for a process without a model


def build(arguments: Mapping[str, str]) -> serve.Application:
    """The application for ``models`` (a file) on ``instance`` (a name; default: what neuron-ls finds).

    Raises:
        ConfigurationError: an argument is unknown or missing.
        PlanError: there is no plan, or it cannot be run.
    """
    unknown = sorted(set(arguments) - _ARGUMENTS)
    if unknown or "models" not in arguments:
        raise ConfigurationError(f"arguments are `models` and `instance`, not {', '.join(arguments) or 'none'}")
    name = arguments.get("instance")
    machine = detect() if name is None else instance(name)
    if machine is None:
        raise ConfigurationError("this machine has no neuron-ls; name the machine with `instance` (cpu to simulate)")
    file = Path(arguments["models"])
    return application(plan(read_models(file), machine), read_fault_policy(file))


def deploy_config(models: Path, instance: str | None, *, host: str, port: int) -> dict[str, object]:
    """The config of `serve deploy` for a models file: the same service as `paceline serve`, kept running by Serve."""
    arguments = {"models": str(models.resolve()), **({} if instance is None else {"instance": instance})}
    application = {"name": "paceline", "route_prefix": "/", "import_path": f"{__name__}:{build.__name__}"}
    return {"http_options": {"host": host, "port": port}, "applications": [{**application, "args": arguments}]}


def application(planned: Plan, fault_policy: FaultPolicy) -> serve.Application:
    """The application for a plan.

    Raises:
        PlanError: a model cannot be run as it was planned.
    """
    validate_plan.check(planned)
    routes: dict[str, list[ModelRoute]] = {}
    for members in groups_of(planned):
        # Drafts first, as the group starts them; the replica itself has the bundle before them.
        ordered = sorted(members, key=lambda item: item.role != "draft")
        handle = _deployment(planned, ordered, fault_policy)
        for item in ordered:
            if item.role == "target":
                routes.setdefault(item.name, []).append(ModelRoute(handle, item.label))
    ingress = serve.deployment(
        Ingress, name="openai", max_ongoing_requests=256, ray_actor_options={"num_cpus": _CPU_SHARE}
    )
    return ingress.bind(routes)


def _deployment(planned: Plan, members: Sequence[Placement], fault_policy: FaultPolicy) -> serve.Application:
    bundles = [{"CPU": _CPU_SHARE}, *({RESOURCE: float(len(item.cores))} for item in members)]
    label = next(item.label for item in members if item.role == "target")
    deployment = serve.deployment(
        Replica,
        name=f"models-{label}",
        num_replicas=1,
        max_ongoing_requests=STREAMS,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
        ray_actor_options={"num_cpus": _CPU_SHARE},
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK",
    )
    return deployment.bind(planned, members, fault_policy)
