"""What the targets of one draft may have: how many of them, how many slots, and whose turns count for more.

    - {name: small, path: models/small, draft_of: [a, b], quota: {max_targets: 2, max_slots: 8, weights: {a: 2}}}

A value that travels from the models file to the drafter's process; `draft_server` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from paceline.core.errors import PlanError

_CLIENTS, _SLOTS = 16, 256
_MOST_SHARE = 10**6
_KEYS = ("max_targets", "max_slots", "weights")


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one drafter's process.

    max_targets  targets that may be connected at the same time
    max_slots    of all their batches together
    weights   client's name -> its share of the time, where not all are to have the same; 1.0 for those not named
    """

    max_targets: int = _CLIENTS
    max_slots: int = _SLOTS
    weights: Mapping[str, float] = field(default_factory=dict)

    def by_label(self, names: Mapping[str, str]) -> Quota:
        """The shares of targets' names as those of their labels: replicas of a target have the same."""
        return replace(
            self, weights={label: self.weights[name] for label, name in names.items() if name in self.weights}
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def read_quota(value: object, where: str) -> Mapping[str, object]:
    """The mapping ``quota`` of a draft's entry, checked key by key.

    Raises:
        PlanError: a key is unknown, or a value is none of its kind.
    """
    if not isinstance(value, dict):
        raise PlanError(f"{where}: quota is a mapping of {', '.join(_KEYS)}, not {value!r}")
    unknown = sorted(str(key) for key in set(value) - set(_KEYS))
    if unknown:
        raise PlanError(f"{where}: {unknown[0]!r} is not a key of quota; there are {', '.join(_KEYS)}")
    for key in ("max_targets", "max_slots"):
        number = value.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PlanError(f"{where}: quota.{key} must be a whole number of at least 1, not {number!r}")
    shares = value.get("weights", {})
    if not isinstance(shares, dict):
        raise PlanError(f"{where}: quota.weights maps names of targets to numbers, not {shares!r}")
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= _MOST_SHARE:
            raise PlanError(
                f"{where}: quota.weights.{name} must be a number above 0, at most {_MOST_SHARE}, not {share!r}"
            )
    return value


def settled(given: Mapping[str, object], where: str, *, targets: Sequence[str], clients: int, slots: int) -> Quota:
    """The quota of a draft that is to serve so many ``clients`` with so many ``slots`` in all.

    Where nothing is said there is room for everybody twice: a target that was started anew may call before its old
    connection is noticed to be gone.

    Raises:
        PlanError: it is too small for the draft's own targets, or names a target the draft does not have.
    """
    shares = given.get("weights", {})
    assert isinstance(shares, dict)
    strange = sorted(set(shares) - set(targets))
    if strange:
        raise PlanError(f"{where}: quota.weights names {strange[0]!r}; its targets are {', '.join(targets)}")
    most = {"max_targets": max(_CLIENTS, 2 * clients), "max_slots": max(_SLOTS, 2 * slots)}
    for key, needed in (("max_targets", clients), ("max_slots", slots)):
        found = given.get(key, most[key])
        assert isinstance(found, int)
        if found < needed:
            raise PlanError(f"{where}: quota.{key}={found}, but the targets it drafts for need {needed}")
        most[key] = found
    return Quota(most["max_targets"], most["max_slots"], {name: float(share) for name, share in shares.items()})
