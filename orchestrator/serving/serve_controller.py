"""What Ray Serve's controller is asked: the state of applications, where Serve listens, and the number of replicas.

The dashboard's REST endpoints `GET /api/serve/applications/` and `POST .../deployments/NAME/scale` ask the same methods
of the same actor; here no dashboard runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.serve._private.common import DeploymentID  # what the method takes; it has no public name
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions

_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What Serve knows of a deployment.

    target    replicas that it is to have
    replicas  those that there are, in whatever state
    status    Serve's word: HEALTHY, UPDATING, UNHEALTHY, ...
    """

    target: int
    replicas: int
    status: str


def controller() -> Any:
    """The actor. Raises ValueError: Serve does not run in this cluster."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def running_address() -> tuple[str, int] | None:
    """Host and port that Serve listens at; None where it does not run.

    Raises:
        RayError: the controller does not answer.
    """
    try:
        actor = controller()
    except ValueError:
        return None
    # What it leaves out has its default value.
    options = ray.get(actor.get_serve_instance_details.remote(), timeout=_ANSWER_S).get("http_options") or {}
    return str(options.get("host", HTTPOptions().host)), int(options.get("port", HTTPOptions().port))


async def deployments(application: str) -> Mapping[str, DeploymentState]:
    """Those of an application, by name.

    Raises:
        RayError, ValueError: the controller does not answer, or is gone.
    """
    details = await controller().get_serve_instance_details.remote()
    listed = details["applications"].get(application, {}).get("deployments", {})
    return {
        name: DeploymentState(int(one["target_num_replicas"]), len(one["replicas"]), str(one["status"]))
        for name, one in listed.items()
    }


async def scale(application: str, deployment: str, replicas: int) -> None:
    """Have so many replicas. Returns before they start or end.

    Raises:
        RayError, ValueError: the controller does not answer, or the application was not deployed with
            ``external_scaler_enabled``.
    """
    await controller().update_deployment_replicas.remote(DeploymentID(deployment, application), replicas)
