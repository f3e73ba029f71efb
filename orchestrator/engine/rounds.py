"""The loop of a round: draft, verify, commit. Knows the protocols of `core`, and slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

import torch
from torch import nn

from paceline.core import tree
from paceline.core.protocols import Drafter, Reading, TraceableDrafter, Verifier
from paceline.core.types import (
    PAD,
    Commit,
    DeviceFeatures,
    Proposal,
    RoundLimits,
    RoundReport,
    RoundResult,
    SamplingTensors,
)
from paceline.engine.adaptive import DraftLengthPolicy
from paceline.engine.batch import Slot
from paceline.engine.fit import DraftFit

MULTI_ROUND_BUDGET_S = 1 / 30
"""Time budget for consecutive fused rounds. Each return to Python costs about 100 us, because a pass over the weights
evicts its code and data from the caches. A larger budget delays streaming and admission.
"""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Drafter and verifier of a round.

    drafter   sees every commit, and proposes
    verifier  verifies the proposals
    width     W of the commits that it reads and makes
    drafts    whether the drafter is called
    reads     whether the drafter sees the commits; False if it never drafts
    fused     the drafter, if it drafts in the verifier's graph: one call per round, which returns only ids and counts
    alone     if no slot can accept anything, a fused round runs without the drafter's step. False if features stay on
              the device: the verifier's own graph would copy them to the host
    """

    drafter: Drafter
    verifier: Verifier
    width: int
    drafts: bool = True
    reads: bool = True
    fused: TraceableDrafter | None = None
    alone: bool = True


class Rounds:
    """One round, the last commit in and the next one out, by one of several plans with the same decoders and drafter.

    A row may have to be decided on the host, or have a prediction to draft from. While no row does, rounds use the
    graphs of a generator without such requests. No row's tokens depend on other rows.

    drafter    of all plans
    plans      by draft length, for requests without logits rules or predictions
    slots      the request of every slot, or None; shared with the engine
    policy       chooses the draft length in every round; None = there is one
    rest       several plain steps, in place of length 0 while every sequence has positions for them
    on_host    makes the plan for batches in which a request is decided on the host, at its first call; None = none may
    predicted  the same for batches in which a request has a prediction
    fit        watches whether the drafter fits the target; None = it need not
    """

    def __init__(
        self,
        drafter: Drafter,
        plans: Mapping[int, RoundPlan],
        slots: Sequence[Slot | None] = (),
        *,
        policy: DraftLengthPolicy | None = None,
        rest: RoundPlan | None = None,
        on_host: Callable[[], RoundPlan] | None = None,
        predicted: Callable[[], RoundPlan] | None = None,
        fit: DraftFit | None = None,
    ) -> None:
        self.fit = fit
        self.drafter, self.plans, self.rest, self._slots, self._policy = drafter, dict(plans), rest, slots, policy
        self._usual = next(reversed(self.plans.values()))
        self.verifier = self._usual.verifier  # any: prefill, finish and moves are the same for all
        self.on_host = None if on_host is None else cache(on_host)
        self.predicted = None if predicted is None else cache(predicted)
        self._special: RoundPlan | None = None  # while some request needs it
        self._seated: set[int] = set()  # slots that take part in rounds
        self._behind = True  # the drafter may have commits to read before a fused round

    # ---- requests

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt on both sides; other slots may go through rounds in its pauses. The last piece of the target's
        and the drafter's first are one.
        """
        self._requests_changed()
        seated = self._slots[slot] if slot < len(self._slots) else None
        if seated is not None and seated.request.drafter is not None:
            self.drafter.restrict(slot, seated.request.drafter)
        first = yield from self.verifier.prefill(slot, prompt, sampling)
        deferred = self._policy is not None and self._policy.resting and self.drafter.defer_request(slot, prompt)
        if deferred:
            self._behind = True
        else:
            yield from self.drafter.read_request(slot, prompt, first.features)
        self._seated.add(slot)
        if self._policy is not None:
            self._policy.begin(slot, unread=deferred)
        return first

    def finish_request(self, slot: int) -> None:
        self._requests_changed()
        self._seated.discard(slot)
        self.drafter.finish_request(slot)
        self.verifier.finish_request(slot)

    @property
    def movable(self) -> bool:
        """Whether requests can go to another slot, so that those in use come first."""
        return self.drafter.movable and self.verifier.movable

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Move everything stored for a request to a free slot; its sequence takes at most ``rows`` cache rows."""
        self.drafter.move_request(slot, to, rows)
        self.verifier.move_request(slot, to, rows)
        if slot in self._seated:
            self._seated.remove(slot)
            self._seated.add(to)
        if self._policy is not None:
            self._policy.move(slot, to)

    def _requests_changed(self) -> None:
        requests = [slot.request for slot in self._slots if slot is not None]
        self._special = None
        if any(request.on_host for request in requests):
            self._special = None if self.on_host is None else self.on_host()
        elif any(request.prediction for request in requests):
            self._special = None if self.predicted is None else self.predicted()

    # ---- rounds

    def __call__(
        self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits, plan: RoundPlan | None = None
    ) -> RoundResult:
        """Run one round, or several consecutive ones. ``plan``: to make its graphs; None: the one that is due."""
        length, early = None, None
        if plan is None:
            plan = self._special or self._usual
            if self._policy is not None and self._special is None:
                length, limits = self._policy.choose(limits, self._seated)
                plan = self.plans[length]
                if length == 0 and self.rest is not None and all(limits.max_accept[slot] for slot in self._seated):
                    plan = self.rest
        drafter, verifier, most, fused = plan.drafter, plan.verifier, limits.max_accept, plan.fused
        if commit.tokens.shape[1] != plan.width or (fused is None and isinstance(commit.features, DeviceFeatures)):
            early, commit = fitted(commit, plan.width, on_device=fused is not None)
        if early is not None:
            self.drafter.update(early)
            self._behind = True
        begin = perf_counter()
        if fused is not None and (any(most) or not (plan.alone or _too_long(fused, limits))):
            if self._behind:
                fused.catch_up()
                self._behind = False
            middle = perf_counter()
            commit, reports = verifier.fused(
                fused, commit, sampling=sampling, limits=limits, seconds=MULTI_ROUND_BUDGET_S
            )
            end = perf_counter()
        else:
            if plan.reads:
                drafter.update(commit)
                self._behind = True
            proposal, drafted = None, [0] * len(most)
            if plan.drafts and any(most):
                proposal = drafter.propose(commit, sampling, limits)
                lengths = proposal.lengths
                drafted = drafted_depths(proposal, most) if lengths is None else list(map(min, lengths, most))
            middle = perf_counter()
            commit = verifier(commit, proposal if any(drafted) else None, sampling, limits)
            end = perf_counter()
            rows = zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)
            tokens, scores, replaced = [row[:count] for row, count in rows], verifier.scores, None
            if scores is not None:
                verifier.scores = None
                replaced = drafted_last(proposal, tokens) if proposal is not None and any(drafted) else None
            reports = [RoundReport(tokens, drafted, end - begin, drafter.predicted, scores, replaced)]
        result = RoundResult(commit, reports, middle - begin, end - middle, length)
        if self.fit is not None and not self.fit.judged and self._special is None:
            self.fit.learn(result, fused=fused is not None)
        if length is not None and self._policy is not None:
            self._policy.learn(length, result, limits, early=early is not None)
        return result


def _too_long(drafter: Drafter, limits: RoundLimits) -> bool:
    return drafter.max_positions is not None and limits.max_rows > drafter.max_positions


def drafted_depths(proposal: Proposal, max_accept: list[int]) -> list[int]:
    """Return how deep a proposal goes in every slot, without a gap and within the limits."""
    parents, rows = proposal.parents, proposal.tokens.tolist()
    if parents is None:
        return [
            next((place for place, token in enumerate(row[:limit]) if token < 0), min(len(row), limit))
            for row, limit in zip(rows, max_accept, strict=True)
        ]
    static = parents if isinstance(parents, tuple) else parents.tolist()
    depths = []
    for slot, (row, limit) in enumerate(zip(rows, max_accept, strict=True)):
        depth_of: list[int] = []  # of every node; 0 = cut off
        for token, parent in zip(row, static if isinstance(static, tuple) else static[slot], strict=True):
            above = 0 if parent == tree.ROOT else depth_of[parent]
            cut = token < 0 or above >= limit or (parent != tree.ROOT and not above)
            depth_of.append(0 if cut else above + 1)
        depths.append(max(depth_of, default=0))
    return depths


def drafted_last(proposal: Proposal, tokens: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens that a proposal had at the place of the last committed token of every slot."""
    parents, found = proposal.parents, []
    for slot, (row, own) in enumerate(zip(proposal.tokens.tolist(), tokens, strict=True)):
        above = parents[slot].tolist() if isinstance(parents, torch.Tensor) else parents or tree.chain(len(row))
        nodes = [node for node, parent in enumerate(above) if parent == tree.ROOT]
        for token in own[:-1]:
            path = {node for node in nodes if row[node] == token}
            nodes = [node for node, parent in enumerate(above) if parent in path]
        found.append([row[node] for node in nodes if row[node] != PAD])
    return found


def fitted(commit: Commit, width: int, *, on_device: bool = False) -> tuple[Commit | None, Commit]:
    """Return a commit of another width with the last tokens, and one with those before them, for the drafter to read
    first. The latter has ``count`` and ``first_row`` 0 in slots that need none, and is None if no slot needs one.

    Features are copied to the host, where no other round overwrites them; ``on_device``: they may stay.
    """
    missing = width - commit.tokens.shape[1]
    if not missing and (on_device or not isinstance(commit.features, DeviceFeatures)):
        return None, commit
    states = commit.states
    if missing >= 0:
        tokens = nn.functional.pad(commit.tokens, (0, missing), value=PAD)
        states = None if states is None else nn.functional.pad(states, (0, 0, 0, missing))
        return None, Commit(tokens, commit.count, commit.first_row, states)
    assert states is None, "commits with features have one width"
    counts = commit.count.tolist()
    if max(counts) <= width:
        return None, replace(commit, tokens=commit.tokens[:, :width].clone(memory_format=torch.contiguous_format))
    before = (commit.count - width).clamp(min=0)
    rows = [row[max(0, count - width) : count] for row, count in zip(commit.tokens.tolist(), counts, strict=True)]
    last = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.int32)
    early = Commit(commit.tokens, before, torch.where(before > 0, commit.first_row, 0))
    return early, Commit(last, commit.count - before, commit.first_row + before)
