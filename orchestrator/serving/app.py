"""From a models file to a Serve application: one deployment for each model, and one for HTTP.

`build` is a builder for `serve deploy`:

    applications:
      - name: paceline
        route_prefix: /
        import_path: paceline.serving.app:build
        args: {models: /path/models.yaml, instance: inf2.48xlarge}

`deploy_config` writes that file. A replica of a model is a replica group (`paceline.placement.planning.groups`): the
process that runs the target, and its draft if that has cores of its own. Serve starts as many as are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig

from paceline.core.errors import ConfigurationError
from paceline.placement import read_fault_policy, read_models
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.reservation import RESOURCE
from paceline.placement.host import environment
from paceline.placement.planning import validate_plan
from paceline.placement.planning.detect import instance_named
from paceline.placement.planning.groups import ReplicaGroupPlan, plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.placement.planning.yaml_file import validate
from paceline.serving.ingress import Ingress
from paceline.serving.replica import ModelReplica
from paceline.serving.serve_loader import deployment_name
from paceline.serving.settings import ApiSettings

_ARGUMENTS = ("models", "instance", "api")
_SHUTDOWN_S = 60.0  # for answers that are under way when the service is taken down
_CPU_SHARE = 0.01  # of a host CPU, as Serve counts it, for each process
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 2.0, 6.0  # three silences in a row: a stopped process is replaced after 24 s
_MAX_WAITING = 1024  # requests of a replica that wait for a slot; more are answered with 429
_UNBOUNDED = 1 << 20  # requests that Serve passes on to a process at the same time: it is the engine that bounds them


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application for ``models``, a file or a list of its entries, on ``instance`` (a name; default: this machine).

    ``api``: fields of `paceline.serving.settings.ApiSettings`.

    Raises:
        ConfigurationError: an argument is unknown, missing or wrong.
        PlanError: there is no plan, or it cannot be run.
    """
    unknown = sorted(set(arguments) - set(_ARGUMENTS))
    if unknown or "models" not in arguments:
        given = ", ".join(arguments) or "none"
        raise ConfigurationError(f"arguments are `models`, and perhaps `instance` and `api`, not {given}")
    models, machine = arguments["models"], instance_named(arguments.get("instance"))
    if isinstance(models, list):
        specs, policy = models_of(models, folder=Path(), where="models"), FaultPolicy()
    else:
        specs, policy = read_models(Path(models)), read_fault_policy(Path(models))
    return application(plan_groups(specs, machine), policy, validate(ApiSettings, arguments.get("api", {}), "api"))


def deploy_config(
    models: Path | Sequence[Mapping[str, object]],
    instance: str | None,
    settings: ApiSettings,
    *,
    host: str,
    port: int,
) -> dict[str, object]:
    """The config of `serve deploy` for a models file or its entries: the service of `paceline serve`, kept running."""
    listed: object = str(models.resolve()) if isinstance(models, Path) else [dict(entry) for entry in models]
    arguments = {"models": listed, **({} if instance is None else {"instance": instance})}
    changed = {key: value for key, value in asdict(settings).items() if value != asdict(ApiSettings())[key]}
    if changed:
        arguments["api"] = {key: list(value) if isinstance(value, tuple) else value for key, value in changed.items()}
    application = {
        "name": "paceline",
        "route_prefix": "/",
        "import_path": f"{__name__}:{build.__name__}",
        "external_scaler_enabled": True,  # models are loaded and unloaded by the ingress
    }
    return {"http_options": {"host": host, "port": port}, "applications": [{**application, "args": arguments}]}


def application(
    groups: Sequence[ReplicaGroupPlan], fault_policy: FaultPolicy, settings: ApiSettings | None = None
) -> serve.Application:
    """The application for planned models.

    Raises:
        PlanError: a model cannot be run as it was planned.
    """
    for group in groups:
        validate_plan.check(group.plan)
    handles = {group.name: _model(group, fault_policy) for group in groups}
    ingress = serve.deployment(
        Ingress,
        name="openai",
        max_ongoing_requests=_UNBOUNDED,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": _CPU_SHARE},
    )
    return ingress.bind(handles, settings or ApiSettings(), groups=tuple(groups), fault_policy=fault_policy)


def _model(group: ReplicaGroupPlan, fault_policy: FaultPolicy) -> serve.Application:
    target, *drafts = group.num_cores
    threads, scaling = dict(group.plan.placements[0].env)["OMP_NUM_THREADS"], group.residency.autoscaling
    variables = {**environment.without_cores(), environment.NOSET: "1", "OMP_NUM_THREADS": threads}
    deployment = serve.deployment(
        ModelReplica,
        name=deployment_name(group.name),
        **({"num_replicas": group.replicas} if scaling is None else {"autoscaling_config": _autoscaling(group)}),
        max_ongoing_requests=_UNBOUNDED,
        max_queued_requests=_MAX_WAITING,
        graceful_shutdown_timeout_s=_SHUTDOWN_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options={
            "num_cpus": _CPU_SHARE,
            "resources": {RESOURCE: target},
            "runtime_env": {"env_vars": variables},
        },
        placement_group_bundles=[
            {"CPU": _CPU_SHARE, RESOURCE: float(target)},
            *({RESOURCE: float(cores)} for cores in drafts),
        ],
        placement_group_strategy="STRICT_PACK" if fault_policy.colocate else "PACK",
    )
    if scaling is None and not group.min_replicas:
        deployment._deployment_config.num_replicas = 0  # its field takes 0, which the options refuse
    return deployment.bind(group, fault_policy, _MAX_WAITING)


def _autoscaling(group: ReplicaGroupPlan) -> AutoscalingConfig:
    residency = group.residency
    scaling = residency.autoscaling
    assert scaling is not None
    idle = {} if residency.idle_ttl_s is None else {"downscale_to_zero_delay_s": residency.idle_ttl_s}
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        target_ongoing_requests=scaling.target_ongoing_requests,
        **idle,
    )
