"""What the process of a target runs: its model, who drafts for it, and the engine that all callers share.

Not here: the process and its cores (`paceline.placement`), and what it answers (`paceline.serving`).
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.protocols import Drafter
from paceline.engine.request import TargetLimits
from paceline.generator import SpeculativeGenerator
from paceline.placement.host.processes import run_apart
from paceline.workers.config import WorkerConfig
from paceline.workers.shared_engine import EngineLimits, SharedEngine


class TargetHost:
    """Generates for all callers together.

    ``remote``: the drafter in another process, if there is one; else those of ``config.speculative`` draft here.
    ``max_waiting``: requests that may wait for a slot; None = any number.
    """

    def __init__(self, config: WorkerConfig, remote: Drafter | None, *, max_waiting: int | None = None) -> None:
        self._target = config.load()
        options = dict(config.speculative)
        if remote is not None:
            options |= {"draft": remote, "k": None}
        self._generator = SpeculativeGenerator(options.pop("draft"), self._target, **options)
        self.engine = SharedEngine(self._generator, limits=EngineLimits(max_waiting))

    @property
    def limits(self) -> TargetLimits:
        """What a request may ask."""
        return self._generator.limits

    @property
    def num_spec_tokens(self) -> int:
        """Most drafted tokens of a round."""
        return self._generator.drafter.draft_shape.num_draft_tokens

    def progress(self) -> int:
        """A number that grows while any request is served."""
        return self.engine.heartbeat

    def statistics(self) -> Mapping[str, object]:
        """Since the target was last idle; complete when it is idle again."""
        return self._generator.statistics.to_dict()

    def compile(self) -> None:
        """Make the graphs before the first request, so that none has to wait for one."""
        self._generator.compile()


def make_target(
    settings: Mapping[str, object], drafter: Drafter | None, *, max_waiting: int | None = None
) -> TargetHost:
    """The default maker of a target's worker. Its engine has a thread of its own, so that it is loaded in another."""
    config = WorkerConfig.from_settings(settings)

    def load() -> TargetHost:
        host = TargetHost(config, drafter, max_waiting=max_waiting)
        host.compile()
        return host

    return run_apart(load)
