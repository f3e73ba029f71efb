"""Models on disjoint cores: catalogue, planner, workers. Ray is imported only when something is launched."""

from typing import TYPE_CHECKING

from paceline.placement.care import Care
from paceline.placement.catalogue import INSTANCES, Instance, instance
from paceline.placement.channel import Address
from paceline.placement.local import LocalProcess, Order
from paceline.placement.models_file import Model, read_care, read_models
from paceline.placement.planner import plan
from paceline.placement.plans import Placement, Plan
from paceline.placement.quota import Quota
from paceline.placement.remote import Patience, RemoteDraft, Terms
from paceline.placement.revival import Caller

if TYPE_CHECKING:
    from paceline.placement.deployment import Deployment, launch

__all__ = [
    "INSTANCES",
    "Address",
    "Caller",
    "Care",
    "Deployment",
    "Instance",
    "LocalProcess",
    "Model",
    "Order",
    "Patience",
    "Placement",
    "Plan",
    "Quota",
    "RemoteDraft",
    "Terms",
    "instance",
    "launch",
    "plan",
    "read_care",
    "read_models",
]

_WITH_RAY = {
    "Deployment": "paceline.placement.deployment",
    "launch": "paceline.placement.deployment",
}


def __getattr__(name: str) -> object:
    """What needs Ray, when it is asked for."""
    if name not in _WITH_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(_WITH_RAY[name]), name)
    return found
