"""What the targets of one draft may use: how many of them, how many slots, and the weight of each one's turns.

    - {name: small, path: models/small, draft_of: [a, b], quota: {max_targets: 2, max_slots: 8, weights: {a: 2}}}

Values only: `Quota` travels from the models file to the drafter's process, where `remote.server` enforces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import pydantic

from paceline.core.errors import PlanError
from paceline.placement.planning.yaml_file import STRICT

_MAX_TARGETS, _MAX_SLOTS = 16, 256
Weight = Annotated[float, pydantic.Field(gt=0, le=10**6)]


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one drafter's process.

    max_targets  targets that may be connected at the same time
    max_slots    slots of all their batches together
    weights      target -> its weight in sharing the time; a target without one has 1.0
    """

    max_targets: int = _MAX_TARGETS
    max_slots: int = _MAX_SLOTS
    weights: Mapping[str, float] = field(default_factory=dict)

    def by_label(self, names: Mapping[str, str]) -> Quota:
        """The same with the weight of each target's name given to all labels of that name (label -> name)."""
        weights = {label: self.weights[name] for label, name in names.items() if name in self.weights}
        return replace(self, weights=weights)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


class QuotaEntry(pydantic.BaseModel):
    """The key ``quota`` of a draft in a models file; what is absent is chosen by `resolve`."""

    model_config = STRICT

    max_targets: pydantic.PositiveInt | None = None
    max_slots: pydantic.PositiveInt | None = None
    weights: dict[str, Weight] = pydantic.Field(default_factory=dict)

    def resolve(self, where: str, *, targets: Sequence[str], num_targets: int, num_slots: int) -> Quota:
        """The quota of a draft with these ``targets``: ``num_targets`` with their replicas, ``num_slots`` in all.

        By default there is room for all of them twice: a target that was restarted may connect before its old
        connection is known to be dead.

        Raises:
            PlanError: the quota is too small for the draft's own targets, or names a target it does not have.
        """
        unknown = sorted(set(self.weights) - set(targets))
        if unknown:
            raise PlanError(
                f"{where}: quota.weights names {unknown[0]!r}, which is not a target of this draft; its targets are "
                f"{', '.join(targets)}"
            )
        for key, limit, needed in (
            ("max_targets", self.max_targets, num_targets),
            ("max_slots", self.max_slots, num_slots),
        ):
            if limit is not None and limit < needed:
                raise PlanError(f"{where}: quota.{key}={limit}, but the targets it drafts for need {needed}; raise it")
        return Quota(
            self.max_targets or max(_MAX_TARGETS, 2 * num_targets),
            self.max_slots or max(_MAX_SLOTS, 2 * num_slots),
            self.weights,
        )
