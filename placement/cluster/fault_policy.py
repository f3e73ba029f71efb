"""Fault policy: how running workers are supervised, given once when they are started.

In a models file it is the mapping ``fault_policy``, next to ``models``; keys that are absent have their defaults:
    fault_policy: {startup_timeout_s: 3600, draft_ahead: true, draft_timeouts: {reply_timeout_s: 0.5}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from paceline.placement.cluster.roles import MAKERS
from paceline.placement.planning.model_specs import ModelSpec, read_fault_policy_entry
from paceline.placement.planning.planner import compile_seconds
from paceline.placement.planning.yaml_file import FORBID_EXTRA, Flag, Seconds, validate
from paceline.placement.remote.drafter import DraftTimeouts
from paceline.placement.remote.reconnect import STARTUP_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """Timeouts and restarts of workers.

    startup_timeout_s    seconds in which a worker must have loaded its model; default 600, more if it compiles graphs
    stall_timeout_s      seconds without progress of an engine with requests, after which its target is replaced
    placement_timeout_s  seconds to wait for a node with enough free cores
    draft_ahead          draft models draft while their targets verify
    colocate             drafts run on the nodes of their targets; False: elsewhere if no node has capacity for both
    draft_timeouts       how long a target waits for its draft, and how often it retries
    makers               role -> "module:function" that makes the worker's object; cannot be given in a file
    """

    startup_timeout_s: Seconds = STARTUP_TIMEOUT_S
    stall_timeout_s: Seconds = 60.0
    placement_timeout_s: Seconds = 30.0
    draft_ahead: Flag = False
    colocate: Flag = True
    draft_timeouts: DraftTimeouts = field(default_factory=DraftTimeouts)
    makers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(MAKERS), metadata={"file": False})

    __pydantic_config__ = FORBID_EXTRA

    def for_models(self, models: Sequence[ModelSpec]) -> FaultPolicy:
        """Return a policy with time to compile: twice the estimate of each model."""
        return replace(self, startup_timeout_s=max([self.startup_timeout_s, *(2 * compile_seconds(x) for x in models)]))


def read_fault_policy(file: Path, models: Sequence[ModelSpec] = ()) -> FaultPolicy:
    """Read the fault policy of a models file; what it lacks has its default for these models.

    Raises:
        PlanError: the file cannot be read, or a value is wrong; the message names it.
    """
    entry = read_fault_policy_entry(file)
    policy = validate(FaultPolicy, entry, f"{file}, fault_policy")
    given = isinstance(entry, Mapping) and "startup_timeout_s" in entry
    return policy if given else policy.for_models(models)
