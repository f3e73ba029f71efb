"""Several drafters for one target: each slot uses the first one that has a proposal, or the best one.

`FallbackDrafter` uses their order: a free drafter (n-grams, suffixes) before a model saves the model's time where the
text repeats, since the model runs only in rounds in which some slot has no proposal.

`ChoiceDrafter` uses the best for the current sequence, in a batch for each slot. Every drafter's proposals are compared
with the target's tokens (`ShadowScores`), even if another drafter's were verified. Drafters that need only tokens
propose in every round; the others if they are the best, at the beginning of a sequence, and at intervals.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Self

from paceline.core.drafter_statistics import DrafterCounts
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.core.types import Commit, DraftShape, Proposal, RoundLimits, SamplingTensors
from paceline.draft.base import TextDrafter

if TYPE_CHECKING:
    from torch import Tensor


class _SeveralDrafters(Drafter):
    """Base of drafters that hold several drafters of chains for the same sequences."""

    draft_lengths: tuple[int, ...] = ()
    _drafters: tuple[Drafter, ...]

    def _take(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.draft_lengths = tuple(sorted({length for drafter in drafters for length in drafter.draft_lengths})) or (0,)
        self.draft_shape = DraftShape.chain(self.draft_lengths[-1])
        # The limit of the drafter that follows longest; the others are called only up to their own limits.
        ends = [drafter.max_positions for drafter in drafters]
        self.max_positions = None if None in ends else max((end for end in ends if end is not None), default=None)

    def shortened(self, length: int) -> Self:
        """Return a copy in which each drafter that proposes more is shortened; data of sequences is shared."""
        shorter = copy.copy(self)
        shorter._take([shortened_of(drafter, length) for drafter in self._drafters])
        return shorter

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        for drafter in self._drafters:
            drafter.add_request(slot, prompt, None if drafter.reads is None else features)

    def finish_request(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.finish_request(slot)

    @property
    def movable(self) -> bool:
        return all(drafter.movable for drafter in self._drafters)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        for drafter in self._drafters:
            drafter.move_request(slot, to, rows)

    def update(self, commit: Commit) -> None:
        for drafter in self._drafters:
            drafter.update(commit)


class FallbackDrafter(_SeveralDrafters):
    """``drafters`` of chains that report no draft probabilities; each proposes where all before it proposed nothing."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ConfigurationError("draft: expected at least one drafter in the list, got none; add one")
        for drafter in drafters:
            if not drafter.draft_shape.is_chain or drafter.reads is not None:
                raise ConfigurationError(
                    "draft: expected drafters of chains that do not read the target's hidden states in a list, got "
                    f"{type(drafter).__name__}; use it without a list"
                )
        # A drafter of no tokens never has anything to propose.
        self._take([drafter for drafter in drafters if drafter.draft_shape.num_draft_tokens])

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        rows: list[list[int]] = [[] for _ in limits.max_accept]
        for drafter in self._drafters:
            left = [0 if row else limit for row, limit in zip(rows, limits.max_accept, strict=True)]
            within = _limits_within(drafter, left, commit, limits=limits)
            if any(within.max_accept):
                chains = drafter.chains(commit, sampling, within)
                rows = [row or chain[:most] for row, chain, most in zip(rows, chains, within.max_accept, strict=True)]
        return Proposal.chains(rows, self.draft_lengths)


def _limits_within(drafter: Drafter, most: list[int], commit: Commit, *, limits: RoundLimits) -> RoundLimits:
    """Return the limits of a round with ``most`` accepted tokens, no further than a drafter can follow a sequence."""
    end = drafter.max_positions
    if end is not None and limits.max_rows + max(most) > end + 1:
        lengths = (commit.first_row + commit.count).tolist()
        most = [max(0, min(limit, end + 1 - length)) for limit, length in zip(most, lengths, strict=True)]
    return limits if most == limits.max_accept else replace(limits, max_accept=most, max_rounds=1)


def shortened_of(drafter: Drafter, length: int) -> Drafter:
    return drafter if drafter.draft_shape.num_draft_tokens <= length else drafter.shortened(length)


_FORGETS_TEXT, _FORGETS_ALL = 0.9, 0.99  # decay per forecast, in a sequence and over all sequences
_PRIOR = 2.0  # weight of all other sequences in a sequence, in forecasts
_FIRST = 1.0  # accepted tokens assumed of an unknown drafter
_SMOOTHING, _OUTLIER = 0.9, 4.0  # of round times


@dataclass(slots=True)
class _Mean:
    """A mean that forgets older values."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, keeps: float) -> None:
        self.weight, self.total = self.weight * keeps + 1, self.total * keeps + value

    def value(self, prior: float, strength: float) -> float:
        return (self.total + prior * strength) / (self.weight + strength)


@dataclass(slots=True)
class _Forecast:
    """A proposal, of which the first ``right`` tokens have come."""

    drafter: int
    chain: Sequence[int]
    right: int = 0


@dataclass(slots=True)
class _TextScores:
    """Scores of one sequence."""

    means: list[_Mean]
    open: list[_Forecast] = field(default_factory=list)


class ShadowScores:
    """Scores of ``count`` drafters over all sequences in slots. Drafters of several depths share one.

    A proposal is a forecast of the sequence. It is compared with the tokens committed after it, verified or not. Means
    decay slowly, because sequences change.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._texts: dict[int, _TextScores] = {}
        self._all = [_Mean() for _ in range(count)]
        self.counts = [DrafterCounts()] * count
        self._propose_seconds: list[float | None] = [None] * count
        self._rest_seconds: float | None = None
        self.rounds = 0

    def begin(self, slot: int) -> None:
        self._texts[slot] = _TextScores([_Mean() for _ in range(self._count)])

    def end(self, slot: int) -> None:
        """Forget the sequence in a slot; forecasts that reach past its end do not count."""
        self._texts.pop(slot, None)

    def move(self, slot: int, to: int) -> None:
        if slot in self._texts:
            self._texts[to] = self._texts.pop(slot)

    def known(self, slot: int, drafter: int) -> bool:
        """Return whether a forecast of this drafter was compared with the sequence, or is being compared."""
        text = self._texts.get(slot)
        return text is not None and (
            text.means[drafter].weight > 0 or any(forecast.drafter == drafter for forecast in text.open)
        )

    def forecast(self, slot: int, drafter: int, chain: Sequence[int]) -> None:
        if chain and slot in self._texts:
            self._texts[slot].open.append(_Forecast(drafter, chain))

    def drafted(self, drafter: int, tokens: int) -> None:
        """Count a proposal of this drafter that is verified."""
        self.counts[drafter] = self.counts[drafter].plus(DrafterCounts(num_drafts=1, num_draft_tokens=tokens))

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        """Compare the forecasts with tokens appended to the sequence in a slot."""
        text = self._texts.get(slot)
        if text is None:
            return
        still_open = []
        for forecast in text.open:
            over = False
            for token in tokens:
                over = forecast.chain[forecast.right] != token
                forecast.right += not over
                over = over or forecast.right == len(forecast.chain)
                if over:
                    break
            if over:
                self._score(text, forecast)
            else:
                still_open.append(forecast)
        text.open = still_open

    def _score(self, text: _TextScores, forecast: _Forecast) -> None:
        scored = DrafterCounts(num_scored=1, num_scored_tokens=forecast.right)
        self.counts[forecast.drafter] = self.counts[forecast.drafter].plus(scored)
        text.means[forecast.drafter].add(forecast.right, _FORGETS_TEXT)
        self._all[forecast.drafter].add(forecast.right, _FORGETS_ALL)

    def expected(self, slot: int, drafter: int) -> float:
        """Return how many tokens of a proposal of this drafter the target is expected to accept."""
        over_all = self._all[drafter].value(_FIRST, _PRIOR)
        text = self._texts.get(slot)
        return over_all if text is None else text.means[drafter].value(over_all, _PRIOR)

    def took(self, drafter: int, seconds: float) -> None:
        self._propose_seconds[drafter] = _smoothed(self._propose_seconds[drafter], seconds)
        self.counts[drafter] = self.counts[drafter].plus(DrafterCounts(propose_seconds=seconds))

    def rest_took(self, seconds: float) -> None:
        """Record a round's time without drafting."""
        self._rest_seconds = _smoothed(self._rest_seconds, seconds)

    def speed(self, slot: int, drafter: int) -> float:
        """Return the expected tokens per second of a round in which this drafter proposes; tokens before times are
        known.
        """
        tokens = 1 + self.expected(slot, drafter)
        propose_seconds, other_seconds = self._propose_seconds[drafter], self._rest_seconds
        return (
            tokens if propose_seconds is None or other_seconds is None else tokens / (propose_seconds + other_seconds)
        )


def _smoothed(before: float | None, now: float) -> float:
    """Smooth a time; outliers such as pauses do not count."""
    return now if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * min(now, _OUTLIER * before)


ChooseBy = Literal["speed", "length"]

SHADOW_EVERY = 8
"""Rounds after which a drafter that costs time and is not the best proposes again."""


class ChoiceDrafter(_SeveralDrafters):
    """``drafters`` of chains that report no draft probabilities. At most one kind of features may be read.

    names      of the drafters, in statistics; default: their classes
    choose_by  "speed": tokens/s, with measured times; "length": accepted tokens only, independent of time
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        names: Sequence[str] = (),
        *,
        choose_by: ChooseBy = "speed",
    ) -> None:
        if len(drafters) < 2:
            raise ConfigurationError(
                "drafts: expected at least two drafters in a choice, got one; use a single one without a choice"
            )
        if choose_by not in ("speed", "length"):
            raise ConfigurationError(f"choose_by: expected 'speed' or 'length', got {choose_by!r}; use one of them")
        for drafter in drafters:
            if not drafter.draft_shape.is_chain:
                raise ConfigurationError(
                    f"drafts: expected drafters of chains in a choice, got {type(drafter).__name__}, which proposes "
                    "trees; let it draft a chain, or use it without a choice"
                )
        features = [drafter.reads for drafter in drafters if drafter.reads is not None]
        if any(spec != features[0] for spec in features):
            raise ConfigurationError(
                "drafts: expected drafters that read the same hidden states of the target, got different ones; use "
                "one of them"
            )
        self.reads = features[0] if features else None
        self._take(drafters)
        self.names = tuple(_numbered(names or [type(drafter).__name__ for drafter in drafters]))
        self._free = tuple(isinstance(drafter, TextDrafter) for drafter in drafters)
        self._by = choose_by
        self._scores = ShadowScores(len(drafters))
        self._proposed: float | None = None  # when this round's proposals were ready
        self._only: dict[int, int] = {}  # the one drafter of a slot whose request names it

    @property
    def choice_counts(self) -> Mapping[str, DrafterCounts]:
        return dict(zip(self.names, self._scores.counts, strict=True))

    def restrict(self, slot: int, name: str) -> None:
        self._only[slot] = self.names.index(name)

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._scores.begin(slot)
        super().add_request(slot, prompt, features)

    def finish_request(self, slot: int) -> None:
        self._scores.end(slot)
        self._only.pop(slot, None)
        super().finish_request(slot)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        self._scores.move(slot, to)
        if slot in self._only:
            self._only[to] = self._only.pop(slot)
        super().move_request(slot, to, rows)

    def update(self, commit: Commit) -> None:
        if self._proposed is not None:
            self._scores.rest_took(perf_counter() - self._proposed)
            self._proposed = None
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            self._scores.wrote(slot, tokens[:count])
        super().update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        scores, most = self._scores, limits.max_accept
        slots = [slot for slot, limit in enumerate(most) if limit > 0]
        scores.rounds += 1
        value = scores.speed if self._by == "speed" else scores.expected
        everybody = range(len(self._drafters))
        proposals: list[list[list[int]]] = [[] for _ in everybody]
        order = {slot: sorted(self._of(slot), key=lambda d, s=slot: -value(s, d)) for slot in slots}  # type: ignore[misc]
        place = [min((ds.index(d) for ds in order.values() if d in ds), default=len(proposals)) for d in everybody]
        for index in sorted(everybody, key=lambda d: (not self._free[d], place[d])):
            if self._free[index] or self._should_propose(index, order, proposals):
                its = [slot for slot in slots if index in order[slot]]
                proposals[index] = self._ask(index, its, commit, sampling=sampling, limits=limits)
        rows: list[list[int]] = [[] for _ in most]
        for slot in slots:
            best = next((d for d in order[slot] if proposals[d] and proposals[d][slot]), None)
            if best is not None:
                rows[slot] = proposals[best][slot][: most[slot]]
                scores.drafted(best, len(rows[slot]))
            for index, chains in enumerate(proposals):
                if chains:
                    scores.forecast(slot, index, chains[slot])
        self._proposed = perf_counter()
        return Proposal.chains(rows, self.draft_lengths)

    def _should_propose(
        self, index: int, order: Mapping[int, Sequence[int]], proposals: Sequence[Sequence[Sequence[int]]]
    ) -> bool:
        """Whether a drafter that costs time proposes: in some slot it is the best of those with a proposal, or too few
        of its forecasts are known, or its interval has passed.
        """
        if self._scores.rounds % SHADOW_EVERY == 0:
            return True
        for slot, drafters in order.items():
            if index not in drafters:
                continue
            if not self._scores.known(slot, index):
                return True
            before = drafters[: drafters.index(index)]
            if not any(proposals[d] and proposals[d][slot] for d in before):
                return True
        return False

    def _of(self, slot: int) -> Sequence[int]:
        """The drafters that may propose in a slot."""
        return range(len(self._drafters)) if slot not in self._only else (self._only[slot],)

    def _ask(
        self, index: int, slots: Collection[int], commit: Commit, *, sampling: SamplingTensors, limits: RoundLimits
    ) -> list[list[int]]:
        """Return the proposals of one drafter in these slots, as far as it can follow, and record the time."""
        drafter, begin = self._drafters[index], perf_counter()
        most = [limit if slot in slots else 0 for slot, limit in enumerate(limits.max_accept)]
        within = _limits_within(drafter, most, commit, limits=limits)
        if not drafter.draft_shape.num_draft_tokens or not any(within.max_accept):
            return [[] for _ in within.max_accept]
        chains = drafter.chains(commit, sampling, within)
        self._scores.took(index, perf_counter() - begin)
        return [chain[:limit] for chain, limit in zip(chains, within.max_accept, strict=True)]


def _numbered(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]
