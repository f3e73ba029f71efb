"""A round whose draft length is chosen anew every time, among lengths that all have graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.protocols import Drafter, Reading, Round, movable, move_request
from paceline.core.types import PAD, Commit, MultiRoundLimits, RoundLimits, RoundResult, SamplingTensors
from paceline.engine.draft_length import ControllersByFill, DraftLengthController


@dataclass(frozen=True, slots=True)
class Stage:
    """A round of one draft length. ``width``: W of the commits it reads and makes."""

    round: Round
    width: int


class AdaptiveRound:
    """Runs one of several rounds, all over the same decoders.

    stages        for every draft length the round that drafts so many tokens. At length 0 the drafter only notes every
                  commit, so that it can go on later
    controller    chooses the length; those of other batch fills are its siblings
    drafter       that of all stages
    rest          a round of several plain steps, in place of length 0 while every text has room for them
    lines         how many lines the graph has that serves so many slots (0 = all), where what a round costs follows
                  that; None: it follows the requests

    A stage reads commits of its own width, because a drafter reads every row of them. Tokens that another stage has
    committed beyond that width become a commit of their own, which the drafter sees before the round.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        controller: DraftLengthController,
        *,
        drafter: Drafter,
        rest: Stage | None = None,
        lines: Callable[[int | None], int] | None = None,
    ) -> None:
        self.stages, self.rest = dict(stages), rest
        self._controllers, self._drafter = ControllersByFill(controller), drafter
        self._first, self._lines = next(iter(self.stages.values())).round, lines
        self._seated: set[int] = set()
        self._lagging: set[int] = set()  # slots with commits that the drafter has not read
        self._no_draft: Tensor | None = None  # limits of a round at length 0
        self._last_limits: tuple[Tensor, list[int]] | None = None  # mostly the same object again

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt on both sides, which all stages share."""
        first = yield from self._first.start(slot, prompt, sampling)
        self._lagging.discard(slot)
        self._seated.add(slot)
        return first

    def finish_request(self, slot: int) -> None:
        """A request has left its slot."""
        self._seated.discard(slot)
        self._first.finish_request(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`."""
        return movable(self._first)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`; all stages share what is kept."""
        move_request([self._first], slot, to, rows=rows)
        for slots in (self._seated, self._lagging):
            if slot in slots:
                slots.remove(slot)
                slots.add(to)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round, or some of the same length."""
        if self._last_limits is None or self._last_limits[0] is not limits.max_accept:
            self._last_limits = (limits.max_accept, limits.max_accept.tolist())
        max_accept = self._last_limits[1]
        fill = len(self._seated) if self._lines is None else self._lines(limits.used_slots) or len(max_accept)
        controller = self._controllers.at(fill)
        length = controller.choose(max(max_accept))
        stage = self.stages[length]
        if length == 0 and self.rest is not None and all(max_accept[slot] for slot in self._seated):
            stage = self.rest
        elif length == 0 and any(max_accept):
            self._no_draft = torch.zeros_like(limits.max_accept) if self._no_draft is None else self._no_draft
            limits = RoundLimits(self._no_draft, limits.max_rows, used_slots=limits.used_slots)
        early = None
        if commit.tokens.shape[1] != stage.width:  # another stage made it
            early, commit = fitted(commit, stage.width)
            if early is not None:
                self._drafter.update(early)
        multi = limits.multi_round
        if multi is not None:
            limits = RoundLimits(
                limits.max_accept,
                limits.max_rows,
                MultiRoundLimits(multi.remaining, multi.end_ids, controller.rounds),
                limits.used_slots,
            )
        result = stage.round(commit, sampling, limits)
        remaining = max_accept if multi is None else multi.remaining
        self._record(controller, length, result, max_accept=max_accept, remaining=remaining, early=early is not None)
        return RoundResult(result.commit, result.reports, result.draft_seconds, result.verify_seconds, length)

    def _record(
        self,
        controller: DraftLengthController,
        length: int,
        result: RoundResult,
        *,
        max_accept: list[int],
        remaining: list[int],
        early: bool,
    ) -> None:
        """Tell the controller what rounds of this length did.

        The time of a round that also read earlier commits is not that of its length.
        """
        for number, report in enumerate(result.reports):
            drafted = [min(length, limit, max(0, left)) for limit, left in zip(max_accept, remaining, strict=True)]
            catches_up = any(drafted[slot] for slot in self._lagging) or (early and length > 0 and number == 0)
            if any(drafted) or length == 0:
                accepted = [len(tokens) - 1 for tokens in report.tokens]
                seconds = None if catches_up else report.seconds
                controller.record(length, requested=drafted, accepted=accepted, seconds=seconds)
            if length == 0:
                self._lagging = set(range(len(drafted)))
            elif self._lagging:
                self._lagging = {slot for slot in self._lagging if not drafted[slot]}
            remaining = [left - len(tokens) for left, tokens in zip(remaining, report.tokens, strict=True)]


def fitted(commit: Commit, width: int) -> tuple[Commit | None, Commit]:
    """A commit without features as one of another width, with its last tokens, and one of those before them.

    The latter has ``count`` and ``start`` 0 in slots that need none, and is None if no slot needs one.
    """
    missing = width - commit.tokens.shape[1]
    if missing > 0:
        return None, Commit(nn.functional.pad(commit.tokens, (0, missing), value=PAD), commit.count, commit.first_row)
    counts = commit.count.tolist()
    if max(counts) <= width:
        tokens = commit.tokens[:, :width].clone(memory_format=torch.contiguous_format)
        return None, Commit(tokens, commit.count, commit.first_row)
    before = (commit.count - width).clamp(min=0)
    rows = [row[max(0, count - width) : count] for row, count in zip(commit.tokens.tolist(), counts, strict=True)]
    last = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.int32)
    early = Commit(commit.tokens, before, torch.where(before > 0, commit.first_row, 0))
    return early, Commit(last, commit.count - before, commit.first_row + before)
