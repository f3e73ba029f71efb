"""Rounds: how a drafter and a verifier are put in sequence. Knows only the protocols of `core`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from paceline.core.protocols import Drafter, Verifier
from paceline.core.types import Bounds, Commit, SamplingBatch


class TwoStep:
    """Draft, then verify: two calls a round.

    ``drafted`` is how many tokens the last round proposed in every slot; the seconds add up over all rounds.
    """

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter, self.verifier = drafter, verifier
        self.drafted: list[int] = []
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = 0.0

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> int:
        """Read a prompt on both sides; the first token."""
        begin = perf_counter()
        first = self.verifier.prefill(slot, prompt, sampling)
        self.drafter.admit(slot, prompt)
        self.prefill_seconds += perf_counter() - begin
        return first

    def release(self, slot: int) -> None:
        """Both sides forget the request in a slot."""
        self.verifier.release(slot)
        self.drafter.release(slot)

    def __call__(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """One round."""
        begin = perf_counter()
        self.drafter.observe(commit)
        limits = bounds.limit.tolist()
        proposal = self.drafter.propose(commit, sampling, bounds) if any(limits) else None
        if proposal is None:
            self.drafted = [0] * len(limits)
        else:
            rows = proposal.tokens.tolist()
            self.drafted = [_real(row[:limit]) for row, limit in zip(rows, limits, strict=True)]
            if not any(self.drafted):
                proposal = None
        middle = perf_counter()
        committed = self.verifier(commit, proposal, sampling, bounds)
        self.draft_seconds += middle - begin
        self.verify_seconds += perf_counter() - middle
        return committed


def _real(row: list[int]) -> int:
    """Tokens before the first one that is none."""
    return next((index for index, token in enumerate(row) if token < 0), len(row))
