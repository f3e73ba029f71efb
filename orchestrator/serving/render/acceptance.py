"""``metrics.speculative_decoding`` of an answer: how much of its drafts was accepted, in vLLM 0.32's schema.

Counted over verification steps in which something was drafted. Definitions:
https://docs.vllm.ai/en/v0.32.0/features/speculative_decoding/acceptance_metrics/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.serving.settings import SpecMetrics


@dataclass(slots=True)
class Acceptance:
    """Counts of one request. ``num_spec_tokens``: most drafted tokens of a step, as the server is set."""

    num_spec_tokens: int
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        """One verification step; steps without a draft are left out."""
        if drafted:
            self.drafted.append(drafted)
            self.accepted.append(accepted)

    def report(self, level: SpecMetrics) -> Mapping[str, object] | None:
        """The value of ``metrics``, or None where nothing is to be said."""
        if level == "none" or not self.num_spec_tokens:
            return None
        longest = max([self.num_spec_tokens, *self.drafted])
        histogram = [0] * (longest + 1)
        by_length: dict[int, list[int]] = {}
        for drafted, accepted in zip(self.drafted, self.accepted, strict=True):
            histogram[accepted] += 1
            by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
        steps, stood, proposed = len(self.drafted), sum(self.accepted), sum(self.drafted)
        report: dict[str, object] = {
            "mean_acceptance_length": 1 + stood / steps if steps else 1.0,
            "draft_acceptance_rate": stood / proposed if proposed else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(k): by_length[k] for k in sorted(by_length)},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": stood,
            "num_draft_tokens": proposed,
            "num_spec_tokens": longest,
        }
        if level == "detailed":
            report |= {"per_step_accepted": list(self.accepted), "per_step_drafted": list(self.drafted)}
        return {"speculative_decoding": report}
