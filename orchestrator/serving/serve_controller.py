"""What Ray Serve's controller is asked: the state of applications, where Serve listens, and the number of replicas.

The dashboard's REST endpoints `GET /api/serve/applications/` and `POST .../deployments/NAME/scale` ask the same methods
of the same actor; here no dashboard runs.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private.common import DeploymentID  # what the method takes; it has no public name
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.schema import ServeInstanceDetails

_ANSWER_S = 30.0


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
    found = ServeInstanceDetails(**ray.get(actor.get_serve_instance_details.remote(), timeout=_ANSWER_S))
    assert found.http_options is not None, "the controller fills it in"
    return str(found.http_options.host), int(found.http_options.port)


async def details() -> ServeInstanceDetails:
    """The applications and their deployments.

    Raises:
        RayError, ValueError: the controller does not answer, or is gone.
    """
    return ServeInstanceDetails(**await controller().get_serve_instance_details.remote())


async def scale(application: str, deployment: str, replicas: int) -> None:
    """Have so many replicas. Returns before they start or end.

    Raises:
        RayError, ValueError: the controller does not answer, or the application was not deployed with
            ``external_scaler_enabled``.
    """
    await controller().update_deployment_replicas.remote(DeploymentID(deployment, application), replicas)
