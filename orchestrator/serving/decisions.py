"""What an operator decided while a service ran: a value.

Not here: where it is kept (`paceline.serving.serve_decisions`), and what follows (`paceline.serving.lifecycle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decisions:
    """Models by name; those that are as the models file says are in none of these.

    pinned    stay in memory
    unpinned  may leave, though the file pins them
    stopped   are unloaded, and no request loads them
    """

    pinned: Sequence[str] = ()
    unpinned: Sequence[str] = ()
    stopped: Sequence[str] = ()
