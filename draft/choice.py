"""Several drafters for one target, of which the best for the current text proposes.

Every drafter's proposals are compared with what the target writes (`paceline.draft.shadow_scores`), also where another
one's were verified. Those that look at the text alone propose in every round; the others, which cost time, where they
are the best, at the beginning of a text, and now and then. In a batch every slot has its own choice. Tokens do not
depend on it: a proposal may come from anybody.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from paceline.core.drafter_counts import DrafterCounts
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, Guesses, movable, move_request
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.draft.base import TextDrafter
from paceline.draft.fallback import chains_of, draft_lengths_of, limits_within, shortened_of
from paceline.draft.shadow_scores import ShadowScores

if TYPE_CHECKING:
    from torch import Tensor

ChooseBy = Literal["speed", "length"]

SHADOW_EVERY = 8
"""Rounds after which a drafter that costs time and is not the best proposes again."""


class ChoiceDrafter:
    """``drafters`` of chains that report no draft probabilities. At most one kind of features may be read.

    names         of the drafters, in statistics; default: their classes
    shadow_every  a drafter that is not the best, and not a text drafter, proposes every so many rounds
    choose_by     "speed": tokens for a second, with times as they are measured; "length": accepted tokens alone, which
                  depends on no time

    Raises:
        ConfigurationError: there are fewer than two, one proposes trees, or two read different states of the target.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        names: Sequence[str] = (),
        *,
        shadow_every: int = SHADOW_EVERY,
        choose_by: ChooseBy = "speed",
    ) -> None:
        if len(drafters) < 2:
            raise ConfigurationError("a choice needs at least two drafters; use a single one by itself")
        if isinstance(shadow_every, bool) or not isinstance(shadow_every, int) or shadow_every < 1:
            raise ConfigurationError(f"shadow_every={shadow_every!r} must be a whole number of at least 1")
        if choose_by not in ("speed", "length"):
            raise ConfigurationError(f"choose_by={choose_by!r} is unknown; use 'speed' or 'length'")
        for drafter in drafters:
            if not drafter.draft_shape.is_chain:
                raise ConfigurationError(
                    f"{type(drafter).__name__} cannot be in a choice of drafters, because it proposes trees; let it "
                    "draft a chain, or use it alone"
                )
        features = [drafter.reads for drafter in drafters if drafter.reads is not None]
        if any(spec != features[0] for spec in features):
            raise ConfigurationError("drafters of a choice read different states of the target; use one of them")
        self.reads: FeatureSpec | None = features[0] if features else None
        self._drafters = tuple(drafters)
        self.names = tuple(_numbered(names or [type(drafter).__name__ for drafter in drafters]))
        self._free = tuple(isinstance(drafter, TextDrafter) for drafter in drafters)
        self._every, self._by = shadow_every, choose_by
        self._scores = ShadowScores(len(drafters))
        self._set_lengths()

    def _set_lengths(self) -> None:
        # Asked for every drafter once: `isinstance` of a protocol is slow.
        self._guesses = tuple(drafter if isinstance(drafter, Guesses) else None for drafter in self._drafters)
        lengths = {length for drafter in self._drafters for length in draft_lengths_of(drafter)}
        self.draft_lengths = tuple(sorted(lengths))
        self.draft_shape = DraftShape.chain(self.draft_lengths[-1])
        ends = [drafter.max_positions for drafter in self._drafters]
        self.max_positions = None if None in ends else max((end for end in ends if end is not None), default=None)

    def shortened(self, length: int) -> ChoiceDrafter:
        """See `paceline.core.protocols.Shortens`. The two share texts and scores.

        Raises:
            ConfigurationError: one of the drafters has one length only.
        """
        shorter = copy.copy(self)
        shorter._drafters = tuple(shortened_of(drafter, length) for drafter in self._drafters)
        shorter._set_lengths()
        return shorter

    @property
    def choice_counts(self) -> Mapping[str, DrafterCounts]:
        """What each drafter did since this one was made, by its name."""
        return dict(zip(self.names, self._scores.counts, strict=True))

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """See `paceline.core.protocols.Drafter`."""
        self._scores.begin(slot)
        for drafter in self._drafters:
            drafter.add_request(slot, prompt, None if drafter.reads is None else features)

    def finish_request(self, slot: int) -> None:
        """See `paceline.core.protocols.Drafter`."""
        self._scores.end(slot)
        for drafter in self._drafters:
            drafter.finish_request(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`."""
        return all(map(movable, self._drafters))

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`."""
        self._scores.move(slot, to)
        move_request(self._drafters, slot, to, rows=rows)

    def update(self, commit: Commit) -> None:
        """See `paceline.core.protocols.Drafter`."""
        self._scores.back()
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            self._scores.wrote(slot, tokens[:count])
        for drafter in self._drafters:
            drafter.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """See `paceline.core.protocols.Drafter`."""
        scores, most = self._scores, limits.max_accept.tolist()
        slots = [slot for slot, limit in enumerate(most) if limit > 0]
        scores.rounds += 1
        value = scores.speed if self._by == "speed" else scores.expected
        everybody = range(len(self._drafters))
        order = {slot: sorted(everybody, key=lambda d, s=slot: -value(s, d)) for slot in slots}  # type: ignore[misc]
        place = [min((drafters.index(d) for drafters in order.values()), default=0) for d in everybody]
        proposals: list[list[list[int]]] = [[] for _ in everybody]
        for index in sorted(everybody, key=lambda d: (not self._free[d], place[d])):
            if self._free[index] or self._should_propose(index, order, proposals):
                proposals[index] = self._ask(index, commit, sampling, limits=limits)
        rows: list[list[int]] = [[] for _ in most]
        for slot in slots:
            best = next((d for d in order[slot] if proposals[d] and proposals[d][slot]), None)
            if best is not None:
                rows[slot] = proposals[best][slot][: most[slot]]
                scores.drafted(best, len(rows[slot]))
            for index, chains in enumerate(proposals):
                if chains:
                    scores.forecast(slot, index, chains[slot])
        scores.handed_over()
        return Proposal.chains(rows, self.draft_lengths)

    def _should_propose(
        self, index: int, order: Mapping[int, Sequence[int]], proposals: Sequence[Sequence[Sequence[int]]]
    ) -> bool:
        """Whether a drafter that costs time proposes: somewhere it is the best of those that have something to say, or
        little is known of it, or it is time again.
        """
        if self._scores.rounds % self._every == 0:
            return True
        for slot, drafters in order.items():
            if not self._scores.known(slot, index):
                return True
            before = drafters[: drafters.index(index)]
            if not any(proposals[d] and proposals[d][slot] for d in before):
                return True
        return False

    def _ask(self, index: int, commit: Commit, sampling: SamplingTensors, *, limits: RoundLimits) -> list[list[int]]:
        """The proposals of one drafter, as long as it can, and how long that took."""
        drafter, begin = self._drafters[index], perf_counter()
        most = limits_within(drafter, limits.max_accept.tolist(), commit, bounds=limits)
        if not drafter.draft_shape.num_draft_tokens or not any(most):
            return [[] for _ in most]
        chains = chains_of(drafter, self._guesses[index], commit, sampling=sampling, most=most, bounds=limits)
        self._scores.took(index, perf_counter() - begin)
        return [chain[:limit] for chain, limit in zip(chains, most, strict=True)]


def _numbered(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]
