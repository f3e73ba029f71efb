"""How running workers are looked after: a value, given once to whoever starts them.

In a models file it is the mapping ``fault_policy``, beside ``models``; what is not named there has its default:

    fault_policy: {startup_timeout_s: 3600, draft_ahead: true, draft_timeouts: {reply_timeout_s: 0.5}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from paceline.core.errors import PlanError
from paceline.placement.cluster.roles import MAKERS
from paceline.placement.remote.drafter import DraftTimeouts
from paceline.placement.remote.reconnect import START

_LONGEST = 7 * 24 * 3600  # seconds; the system's own clocks for sockets end at 24 days


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How workers are looked after; seconds, and how often.

    startup_timeout_s     a worker may take to load its model
    stall_timeout_s   a target may say nothing in the middle of a request, before it counts as hung; the first round has
              ``start`` on top, for it may compile
    placement_timeout_s      to wait for a node with enough free cores
    max_target_restarts   deaths of its target that one request survives
    draft_ahead     drafts work while their targets verify
    colocate      drafts are on the nodes of their targets; False: they may be elsewhere, where no node has room for
                  both
    makers    role -> "module:function" that makes what a worker runs; not in a file
    """

    startup_timeout_s: float = START
    stall_timeout_s: float = 60.0
    placement_timeout_s: float = 30.0
    max_target_restarts: int = 2
    draft_ahead: bool = False
    colocate: bool = True
    draft_timeouts: DraftTimeouts = field(default_factory=DraftTimeouts)
    makers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(MAKERS))


def fault_policy_of(entry: object, where: str) -> FaultPolicy:
    """The mapping ``fault_policy`` of a models file, checked key by key.

    Raises:
        PlanError: a key is unknown, or a value is none of its kind.
    """
    found = _read(FaultPolicy(), entry, where)
    if "draft_timeouts" in found:
        found["draft_timeouts"] = replace(
            DraftTimeouts(), **_read(DraftTimeouts(), found["draft_timeouts"], f"{where}.draft_timeouts")
        )
    return replace(FaultPolicy(), **found)


def _read(defaults: FaultPolicy | DraftTimeouts, entry: object, where: str) -> dict[str, Any]:
    known = {item.name: getattr(defaults, item.name) for item in fields(defaults) if item.name != "makers"}
    if not isinstance(entry, dict):
        raise PlanError(f"{where} is a mapping of {', '.join(known)}, not {entry!r}")
    unknown = sorted(str(key) for key in set(entry) - set(known))
    if unknown:
        raise PlanError(f"{where}: {unknown[0]!r} is not a key; there are {', '.join(known)}")
    return {key: _value(known[key], value, f"{where}.{key}") for key, value in entry.items()}


def _value(default: object, value: object, where: str) -> object:
    """The value, which is of its default's kind."""
    if isinstance(default, DraftTimeouts):
        return value  # a mapping of its own
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise PlanError(f"{where} must be true or false, not {value!r}")
        return value
    if isinstance(default, int):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(f"{where} must be a whole number, not {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LONGEST:
        raise PlanError(f"{where} must be seconds, more than 0 and at most {_LONGEST} (a week), not {value!r}")
    return float(value)
