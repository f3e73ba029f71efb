"""How running workers are looked after: a value, given once to whoever starts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from paceline.placement.remote import Patience
from paceline.placement.roles import MAKERS


@dataclass(frozen=True, slots=True)
class Care:
    """How workers are looked after; seconds, and how often.

    start     a worker may take to load its model
    silence   a target may say nothing in the middle of a request, before it counts as hung; the first round has
              ``start`` on top, for it may compile
    room      to wait for a node with enough free cores
    retries   deaths of its target that one request survives
    ahead     drafts work while their targets verify
    near      drafts are on the nodes of their targets; False: they may be elsewhere, where no node has room for both
    makers    role -> "module:function" that makes what a worker runs
    """

    start: float = 600.0
    silence: float = 60.0
    room: float = 30.0
    retries: int = 2
    ahead: bool = False
    near: bool = True
    patience: Patience = field(default_factory=Patience)
    makers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(MAKERS))
