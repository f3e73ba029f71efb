"""Models on disjoint cores: catalogue, planner, workers. Ray is imported only when something is launched."""

from paceline.placement.catalogue import INSTANCES, Instance, instance
from paceline.placement.models_file import Model, read_models
from paceline.placement.plan import Placement, Plan
from paceline.placement.planner import plan

__all__ = ["INSTANCES", "Instance", "Model", "Placement", "Plan", "instance", "plan", "read_models"]
