"""Target's process: its model, its drafter, and the engine that all callers share.

See also: the process and its cores (`paceline.placement`), and the responses (`paceline.serving`).
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.protocols import Drafter
from paceline.engine.request import TargetLimits
from paceline.generator import SpeculativeGenerator
from paceline.placement.host.processes import run_apart
from paceline.workers.config import WorkerConfig
from paceline.workers.shared_engine import SharedEngine


class TargetHost:
    """Generator shared by all callers.

    ``remote``: the drafter in another process, if any; else the drafters of ``config.speculative`` run in this process.
    ``max_waiting``: requests that may wait for a slot; None: no limit.
    """

    def __init__(self, config: WorkerConfig, remote: Drafter | None, *, max_waiting: int | None = None) -> None:
        self._target = config.load()
        options = dict(config.speculative)
        if remote is not None:
            options |= {"draft": remote, "k": None}
        self._generator = SpeculativeGenerator(options.pop("draft"), self._target, **options)
        self._generator.compile()  # before the first request, so that no request waits for a graph
        self.engine = SharedEngine(self._generator, max_waiting=max_waiting)

    @property
    def limits(self) -> TargetLimits:
        """Limits on requests."""
        return self._generator.limits

    @property
    def num_spec_tokens(self) -> int:
        """Maximum number of drafted tokens per round."""
        return self._generator.drafter.draft_shape.num_draft_tokens

    def statistics(self) -> Mapping[str, object]:
        """Return the statistics since the target was last idle; they are complete when it is idle again."""
        return self._generator.statistics.to_dict()


def make_target(
    settings: Mapping[str, object], drafter: Drafter | None, *, max_waiting: int | None = None
) -> TargetHost:
    """Make a target's worker, by default. Its engine has its own thread, so the model is loaded in another one."""
    config = WorkerConfig.from_settings(settings)
    return run_apart(lambda: TargetHost(config, drafter, max_waiting=max_waiting))
