"""Models on disjoint cores: catalogue, planner, workers. Ray is imported only when something is launched."""

from typing import TYPE_CHECKING

from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.instances import INSTANCES, Instance, instance
from paceline.placement.planning.model_specs import ModelSpec, read_care, read_models
from paceline.placement.planning.plan import Placement, Plan
from paceline.placement.planning.planner import plan
from paceline.placement.planning.quota import Quota
from paceline.placement.remote.channel import Address
from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts, RemoteDrafter
from paceline.placement.remote.local_process import LocalProcess, Order
from paceline.placement.remote.reconnect import DrafterEndpoint

if TYPE_CHECKING:
    from paceline.placement.cluster.deployment import Deployment, launch

__all__ = [
    "INSTANCES",
    "Address",
    "Deployment",
    "DraftTimeouts",
    "DrafterContract",
    "DrafterEndpoint",
    "FaultPolicy",
    "Instance",
    "LocalProcess",
    "ModelSpec",
    "Order",
    "Placement",
    "Plan",
    "Quota",
    "RemoteDrafter",
    "instance",
    "launch",
    "plan",
    "read_care",
    "read_models",
]

_WITH_RAY = {
    "Deployment": "paceline.placement.cluster.deployment",
    "launch": "paceline.placement.cluster.deployment",
}


def __getattr__(name: str) -> object:
    """What needs Ray, when it is asked for."""
    if name not in _WITH_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(_WITH_RAY[name]), name)
    return found
