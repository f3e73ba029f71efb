"""Target's process: the engine of its model and drafter, which all callers share."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.protocols import Drafter
from paceline.generator import SpeculativeGenerator
from paceline.placement.host.processes import run_apart
from paceline.workers.config import WorkerConfig
from paceline.workers.shared_engine import SharedEngine


def make_target(
    settings: Mapping[str, object], drafter: Drafter | None, *, max_waiting: int | None = None
) -> SharedEngine:
    """Make a target's worker, by default. Its engine has its own thread, so the model is loaded in another one.

    ``drafter``: the one in another process, if any; else those of the settings run in this process. ``max_waiting``:
    requests that may wait for a slot; None: no limit.
    """
    config = WorkerConfig.from_settings(settings)

    def load() -> SharedEngine:
        target, options = config.load(), dict(config.speculative)
        if drafter is not None:
            options |= {"draft": drafter, "k": None}
        generator = SpeculativeGenerator(options.pop("draft"), target, **options)
        generator.compile()  # before the first request, so that no request waits for a graph
        return SharedEngine(generator, max_waiting=max_waiting)

    return run_apart(load)
