"""The loop of a round: draft, verify, commit. Knows the protocols of `core`, and slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from paceline.engine.adaptive import Pace
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
    fused     draft and verify in one graph: one call per round, which returns only ids and counts
    alone     if no slot can accept anything, a fused round runs without the drafter's step. False if features stay on
              the device: the verifier's own graph would copy them to the host
    """

    drafter: Drafter
    verifier: Verifier
    width: int
    drafts: bool = True
    fused: bool = False
    alone: bool = True


class Rounds:
    """A `paceline.core.protocols.Round` that selects one of several plans, all with the same decoders and drafter.

    A row may have to be decided on the host, or have a prediction to draft from. While no row does, rounds use the
    graphs of a generator without such requests. No row's tokens depend on other rows.

    drafter    of all plans
    plans      by draft length, for requests without logits rules or predictions
    slots      the request of every slot, or None; shared with the engine
    pace       chooses the draft length in every round; None = there is one
    rest       several plain steps, in place of length 0 while every sequence has positions for them
    on_host    makes the plan for batches in which a request is decided on the host
    predicted  makes the plan for batches in which a request has a prediction; None = none may
    fit        watches whether the drafter fits the target; None = it need not
    """

    def __init__(
        self,
        drafter: Drafter,
        plans: Mapping[int, RoundPlan],
        slots: Sequence[Slot | None] = (),
        *,
        pace: Pace | None = None,
        rest: RoundPlan | None = None,
        on_host: Callable[[], RoundPlan] | None = None,
        predicted: Callable[[], RoundPlan] | None = None,
        fit: DraftFit | None = None,
    ) -> None:
        self.fit = fit
        self.drafter, self.plans, self.rest, self._slots, self._pace = drafter, dict(plans), rest, slots, pace
        self._usual = next(reversed(self.plans.values()))
        self.verifier = self._usual.verifier  # any: prefill, finish and moves are the same for all
        self._make = {"on_host": on_host, "predicted": predicted}
        self._made: dict[str, RoundPlan] = {}
        self._special: RoundPlan | None = None  # while some request needs it
        self._seated: set[int] = set()  # slots that take part in rounds

    # ---- requests

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt on both sides. The last piece of the target's and the drafter's first are one."""
        self._requests_changed()
        first = yield from self.verifier.prefill(slot, prompt, sampling)
        yield from self.drafter.read_request(slot, prompt, first.features)
        self._seated.add(slot)
        if self._pace is not None:
            self._pace.begin(slot)
        return first

    def finish_request(self, slot: int) -> None:
        """A request has left its slot: tell both sides."""
        self._requests_changed()
        self._seated.discard(slot)
        self.drafter.finish_request(slot)
        self.verifier.finish_request(slot)

    @property
    def movable(self) -> bool:
        """Whether both sides are."""
        return self.drafter.movable and self.verifier.movable

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Give all that is kept of the request in a slot to a free one."""
        self.drafter.move_request(slot, to, rows)
        self.verifier.move_request(slot, to, rows)
        if slot in self._seated:
            self._seated.remove(slot)
            self._seated.add(to)
        if self._pace is not None:
            self._pace.move(slot, to)

    def plan_for(self, needs: str) -> RoundPlan | None:
        """The plan for requests that are "on_host" or "predicted", where they may be."""
        make = self._make[needs]
        if needs not in self._made and make is not None:
            self._made[needs] = make()
        return self._made.get(needs)

    def _requests_changed(self) -> None:
        requests = [slot.request for slot in self._slots if slot is not None]
        self._special = None
        if any(request.on_host for request in requests):
            self._special = self.plan_for("on_host")
        elif any(request.prediction for request in requests):
            self._special = self.plan_for("predicted")

    # ---- rounds

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """Run one round, or several consecutive ones."""
        pace, plan = None if self._special is not None else self._pace, self._special or self._usual
        length, early = 0, None
        if pace is not None:
            length, limits = pace.choose(limits, self._seated)
            plan = self.plans[length]
            if length == 0 and self.rest is not None and all(limits.max_accept[slot] for slot in self._seated):
                plan = self.rest
        if commit.tokens.shape[1] != plan.width or (not plan.fused and isinstance(commit.features, DeviceFeatures)):
            early, commit = fitted(commit, plan.width, on_device=plan.fused)
        if early is not None:
            self.drafter.update(early)
        result = self.run(plan, commit, sampling=sampling, limits=limits)
        if self.fit is not None and self._special is None:
            self.fit.learn(result, fused=plan.fused)
        if pace is None:
            return result
        pace.learn(length, result, limits, early=early is not None)
        return RoundResult(result.commit, result.reports, result.draft_seconds, result.verify_seconds, length)

    def run(self, plan: RoundPlan, commit: Commit, *, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """Run one round, or several consecutive ones, by a plan."""
        begin, drafter, verifier, most = perf_counter(), plan.drafter, plan.verifier, limits.max_accept
        if plan.fused and (any(most) or not (plan.alone or _too_long(drafter, limits))):
            assert isinstance(drafter, TraceableDrafter)
            drafter.catch_up()
            middle = perf_counter()
            done = verifier.fused(drafter, commit, sampling=sampling, limits=limits, seconds=MULTI_ROUND_BUDGET_S)
            return RoundResult(done.commit, done.reports, middle - begin, perf_counter() - middle)
        drafter.update(commit)
        proposal, drafted = None, [0] * len(most)
        if plan.drafts and any(most):
            proposal = drafter.propose(commit, sampling, limits)
            drafted = drafted_depths(proposal, most)
        middle = perf_counter()
        commit = verifier(commit, proposal if any(drafted) else None, sampling, limits)
        end = perf_counter()
        rows = zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)
        tokens = [row[:count] for row, count in rows]
        report = RoundReport(tokens, drafted, end - begin, drafter.predicted, verifier.scores)
        if verifier.scores is not None:
            verifier.scores = None
            if any(drafted):
                assert proposal is not None
                report = replace(report, replaced=drafted_last(proposal, tokens))
        return RoundResult(commit, [report], middle - begin, end - middle)


def _too_long(drafter: Drafter, limits: RoundLimits) -> bool:
    """Return whether a sequence is longer than the drafter can follow."""
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
