"""Models on disjoint cores: assignment of cores to models (`planning`), processes with cores on Ray (`cluster`),
drafters in other processes (`remote`), asynchronous drafting (`lookahead`), and the local machine (`host`).

Every name below is imported when it is first used, so that planning loads neither Ray nor sockets.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.placement.cluster.fault_policy import FaultPolicy, read_fault_policy
    from paceline.placement.planning.instances import INSTANCES, Instance, instance
    from paceline.placement.planning.model_specs import ModelSpec, read_models
    from paceline.placement.planning.plan import Placement, Plan
    from paceline.placement.planning.planner import plan
    from paceline.placement.remote.channel import Address
    from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts, RemoteDrafter
    from paceline.placement.remote.process import LocalProcess, ProcessSpec
    from paceline.placement.remote.reconnect import DrafterEndpoint
    from paceline.serving.deployment import Deployment, launch

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
    "Placement",
    "Plan",
    "ProcessSpec",
    "RemoteDrafter",
    "instance",
    "launch",
    "plan",
    "read_fault_policy",
    "read_models",
]

_MODULES = {
    "serving.deployment": ("Deployment", "launch"),
    "placement.cluster.fault_policy": ("FaultPolicy", "read_fault_policy"),
    "placement.planning.instances": ("INSTANCES", "Instance", "instance"),
    "placement.planning.model_specs": ("ModelSpec", "read_models"),
    "placement.planning.plan": ("Placement", "Plan"),
    "placement.planning.planner": ("plan",),
    "placement.remote.channel": ("Address",),
    "placement.remote.drafter": ("DraftTimeouts", "DrafterContract", "RemoteDrafter"),
    "placement.remote.process": ("LocalProcess", "ProcessSpec"),
    "placement.remote.reconnect": ("DrafterEndpoint",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"paceline.{_MODULE_OF[name]}"), name)
    return value
