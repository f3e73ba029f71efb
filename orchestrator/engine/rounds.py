"""Rounds: how a drafter and a verifier are put in sequence. Knows only the protocols of `core`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from paceline.core import tree
from paceline.core.protocols import AutoregressiveTarget, Drafter, FusedVerifier, TraceableDrafter, Verifier
from paceline.core.types import Commit, PrefillResult, Proposal, RoundLimits, RoundResult, SamplingTensors

MULTI_ROUND_BUDGET_S = 1 / 30
"""Seconds. As many fused rounds as fit run one behind the other before the host looks at what they made: behind a pass
over the weights its code and data are cold, so that it takes nearly as long for one round as for some. No longer, for
who reads along, and for who waits for a slot.
"""


class RoundBase:
    """What all rounds have: reading a prompt on both sides, and seconds, which add up over all rounds. ``rung`` is the
    depth that was chosen for the last one, where there is a choice.
    """

    draft_length: int | None = None

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self._sides = (drafter, verifier)
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = 0.0

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> PrefillResult:
        """Read a prompt on both sides."""
        begin = perf_counter()
        drafter, verifier = self._sides
        reading = verifier.prefill(slot, prompt, sampling)
        drafter.add_request(slot, prompt, reading.features)
        self.prefill_seconds += perf_counter() - begin
        return reading

    def finish_request(self, slot: int) -> None:
        """A request is gone from a slot, on both sides."""
        for side in self._sides:
            side.finish_request(slot)


class TwoGraphRound(RoundBase):
    """Draft, then verify: two calls a round."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        super().__init__(drafter, verifier)
        self.drafter, self.verifier = drafter, verifier

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult:
        """One round."""
        begin = perf_counter()
        self.drafter.update(commit)
        limits = bounds.max_accept.tolist()
        proposal = self.drafter.propose(commit, sampling, bounds) if any(limits) else None
        drafted = [0] * len(limits) if proposal is None else reached(proposal, limits)
        if not any(drafted):
            proposal = None
        middle = perf_counter()
        committed = self.verifier(commit, proposal, sampling, bounds)
        end = perf_counter()
        self.draft_seconds += middle - begin
        self.verify_seconds += end - middle
        return RoundResult.single(committed, drafted, end - begin)


class FusedRound(RoundBase):
    """Draft and verify in one graph: one call a round, and only ids and counts come back.

    ``verify_seconds`` counts the whole call; ``draft_seconds`` what the drafter still does outside of it.
    ``alone``: where no slot can accept anything, the verifier runs by itself. Not so where features stay on a device:
    it would bring them to the host, from a graph of its own.
    """

    def __init__(self, drafter: TraceableDrafter, verifier: FusedVerifier, *, alone: bool = True) -> None:
        super().__init__(drafter, verifier)
        self.drafter, self.verifier, self._alone = drafter, verifier, alone

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult:
        """One round, or several in a row."""
        begin = perf_counter()
        self.drafter.update(commit)
        limits = bounds.max_accept.tolist()
        beyond = self.drafter.max_positions is not None and bounds.max_rows > self.drafter.max_positions
        if not any(limits) and (self._alone or beyond):
            committed = self.verifier(commit, None, sampling, bounds)
            seconds = perf_counter() - begin
            self.verify_seconds += seconds
            return RoundResult.single(committed, [0] * len(limits), seconds)
        self.drafter.catch_up()
        middle = perf_counter()
        done = self.verifier.fused(self.drafter, commit, sampling=sampling, bounds=bounds, seconds=MULTI_ROUND_BUDGET_S)
        self.draft_seconds += middle - begin
        self.verify_seconds += perf_counter() - middle
        return done


class MultiTokenRound:
    """Nothing is drafted: several plain steps in one graph."""

    draft_length: int | None = None
    draft_seconds = 0.0

    def __init__(self, target: AutoregressiveTarget) -> None:
        self._target = target
        self.prefill_seconds = self.verify_seconds = 0.0

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> PrefillResult:
        """Read a prompt."""
        begin = perf_counter()
        reading = self._target.prefill(slot, prompt, sampling)
        self.prefill_seconds += perf_counter() - begin
        return reading

    def finish_request(self, slot: int) -> None:
        """Nothing to forget."""

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult:
        """One round."""
        begin = perf_counter()
        made = self._target(commit, sampling, bounds)
        seconds = perf_counter() - begin
        self.verify_seconds += seconds
        return RoundResult.single(made, [0] * len(made.count), seconds)


class UndraftedRound(MultiTokenRound):
    """The same beside a drafter that is not asked: it is told of every commit, so that it has no gap when it is."""

    def __init__(self, drafter: Drafter, target: AutoregressiveTarget) -> None:
        super().__init__(target)
        self._drafter = drafter

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult:
        """One round."""
        self._drafter.update(commit)
        return super().__call__(commit, sampling, bounds)


def reached(proposal: Proposal, limits: list[int]) -> list[int]:
    """How deep a proposal goes in every slot without a gap and within the limits."""
    parents = proposal.parents
    given = None if parents is None else parents if isinstance(parents, tuple) else parents.tolist()
    found = []
    for slot, (row, limit) in enumerate(zip(proposal.tokens.tolist(), limits, strict=True)):
        line = tree.chain(len(row)) if given is None else given if isinstance(given, tuple) else given[slot]
        depth: list[int] = []  # of every node; 0 = cut off
        for token, parent in zip(row, line, strict=True):
            above = 0 if parent == tree.ROOT else depth[parent]
            cut = token < 0 or above >= limit or (parent != tree.ROOT and not above)
            depth.append(0 if cut else above + 1)
        found.append(max(depth, default=0))
    return found
