"""The contracts between the parts of a round. One or two methods each, so that a fake is a page.

    proposal = drafter.propose(commit); commit = verifier(commit, proposal)

Plain decoding is the drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from paceline.core.types import Bounds, Commit, Proposal, SamplingBatch


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. It may be wrong, late or absent: the tokens a user gets do not depend on it.

    A drafter keeps no length of its own: it re-reads the whole last commit.
    """

    @property
    def nodes(self) -> int:
        """N, how many nodes a proposal has."""

    @property
    def reach(self) -> int | None:
        """How many positions of a text it can follow; None = no limit. Past it nothing is asked of it."""

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """A request takes a slot: read its prompt."""

    def release(self, slot: int) -> None:
        """The request in a slot is done, finished or given up: forget it. Its cache rows may keep what they hold."""

    def observe(self, commit: Commit) -> None:
        """See a commit. Called once for every commit, before `propose`, whether or not `propose` follows."""

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        """Propose what follows the commit. Slots that hold no request may get anything."""


class Verifier(Protocol):
    """The target's side of a round: decoder, law, acceptor and keep as one step."""

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> int:
        """Read a prompt into a slot and pick the first token. ``sampling`` has one row, the slot's."""

    def release(self, slot: int) -> None:
        """The request in a slot is done: forget it."""

    def __call__(self, commit: Commit, proposal: Proposal | None, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """Verify a proposal; None = nothing is proposed."""


class Round(Protocol):
    """From what was last committed to what is committed next."""

    @property
    def width(self) -> int:
        """W, the most tokens one round can commit."""

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> int:
        """Read a prompt into a slot and return the first token."""

    def release(self, slot: int) -> None:
        """The request in a slot is done, or `start` failed for it: both sides forget it."""

    def __call__(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """One round."""
