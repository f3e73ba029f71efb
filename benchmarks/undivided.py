"""Makers for what is about cores and not about ranks: however many cores a worker has, its model is whole."""

from __future__ import annotations

from paceline.core.protocols import Drafter
from paceline.placement.cluster.roles import Settings
from paceline.placement.remote.server import DrafterPool
from paceline.workers.draft import make_drafters
from paceline.workers.shared_engine import SharedEngine
from paceline.workers.target import make_target

MAKERS = {role: f"benchmarks.undivided:{role}" for role in ("target", "draft")}


def target(settings: Settings, drafter: Drafter | None, *, max_waiting: int | None = None) -> SharedEngine:
    return make_target({**settings, "tp_degree": 1}, drafter, max_waiting=max_waiting)


def draft(settings: Settings) -> DrafterPool:
    return make_drafters({**settings, "tp_degree": 1})
