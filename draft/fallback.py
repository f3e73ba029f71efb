"""Several drafters in order: in every slot, the first that has something to propose does.

A free drafter (n-grams, suffixes) in front of a model costs nothing where the text does not repeat, and spares the
model where it does. The model runs only in rounds in which some slot is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, Guesses, Shortens, Varies, movable, move_request
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors

if TYPE_CHECKING:
    from torch import Tensor


class FallbackDrafter:
    """``drafters`` of chains that report no draft probabilities; each proposes where all before it proposed nothing.

    Raises:
        ConfigurationError: there is none, or one proposes trees or reads the target's states.
    """

    reads: FeatureSpec | None = None

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ConfigurationError("a list of drafters needs at least one")
        for drafter in drafters:
            if not drafter.draft_shape.is_chain or drafter.reads is not None:
                raise ConfigurationError(
                    f"{type(drafter).__name__} cannot be in a list of drafters, because it proposes trees or reads the "
                    "target's states; use it alone"
                )
        # A drafter of no tokens never has anything to propose.
        self._drafters = tuple(drafter for drafter in drafters if drafter.draft_shape.num_draft_tokens)
        # Asked for every drafter once: `isinstance` of a protocol is slow.
        self._guesses = [drafter if isinstance(drafter, Guesses) else None for drafter in self._drafters]
        lengths = {length for drafter in self._drafters for length in draft_lengths_of(drafter)}
        self.draft_lengths = tuple(sorted(lengths)) or (0,)
        self.draft_shape = DraftShape.chain(self.draft_lengths[-1])
        # As far as the drafter that follows longest; the others are asked only as far as each of them follows.
        ends = [drafter.max_positions for drafter in self._drafters]
        self.max_positions = None if None in ends else max((end for end in ends if end is not None), default=None)

    def shortened(self, length: int) -> FallbackDrafter:
        """See `paceline.core.protocols.Shortens`. Each drafter that proposes more is shortened.

        Raises:
            ConfigurationError: one of them has one length only.
        """
        return FallbackDrafter([shortened_of(drafter, length) for drafter in self._drafters])

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        for drafter in self._drafters:
            drafter.add_request(slot, prompt)

    def finish_request(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.finish_request(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`."""
        return all(map(movable, self._drafters))

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`."""
        move_request(self._drafters, slot, to, rows=rows)

    def update(self, commit: Commit) -> None:
        for drafter in self._drafters:
            drafter.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        limits = bounds.max_accept.tolist()
        rows: list[list[int]] = [[] for _ in limits]
        for drafter, guesses in zip(self._drafters, self._guesses, strict=True):
            open_limits = [0 if row else limit for row, limit in zip(rows, limits, strict=True)]
            open_limits = limits_within(drafter, open_limits, commit, bounds=bounds)
            if not any(open_limits):
                continue
            chains = chains_of(drafter, guesses, commit, sampling=sampling, most=open_limits, bounds=bounds)
            rows = [row or chain[:most] for row, chain, most in zip(rows, chains, open_limits, strict=True)]
        return Proposal.chains(rows, self.draft_lengths)


def draft_lengths_of(drafter: Drafter) -> tuple[int, ...]:
    """Lengths of its drafts that are worth a graph of their own."""
    return drafter.draft_lengths if isinstance(drafter, Varies) else (drafter.draft_shape.num_draft_tokens,)


def limits_within(drafter: Drafter, limits: list[int], commit: Commit, *, bounds: RoundLimits) -> list[int]:
    """The limits of a round, no further than a drafter can follow a text."""
    end = drafter.max_positions
    if end is None or bounds.max_rows + max(limits) <= end + 1:
        return limits
    lengths = (commit.first_row + commit.count).tolist()
    room = [max(0, end + 1 - length) for length in lengths]
    return [min(both) for both in zip(limits, room, strict=True)]


def chains_of(
    drafter: Drafter,
    guesses: Guesses | None,
    commit: Commit,
    *,
    sampling: SamplingTensors,
    most: list[int],
    bounds: RoundLimits,
) -> list[list[int]]:
    """The chains of a drafter within these limits; [] where it proposes nothing. ``guesses``: itself, if it does.

    Raises:
        ConfigurationError: they were drawn from probabilities.
    """
    if guesses is not None:
        return guesses.guess(most)
    import torch

    same = most == bounds.max_accept.tolist()
    limits = bounds if same else replace(bounds, max_accept=torch.tensor(most, dtype=torch.int32), multi_round=None)
    proposal = drafter.propose(commit, sampling, limits)
    if proposal.draft_probs is not None:
        raise ConfigurationError("drafters in a list must not draw from probabilities; use acceptor='match'")
    return [list(takewhile(lambda token: token >= 0, row)) for row in proposal.tokens.tolist()]


def shortened_of(drafter: Drafter, length: int) -> Drafter:
    """A drafter that proposes ``length`` tokens at most, on the same state.

    Raises:
        ConfigurationError: it has one length only, which is more.
    """
    if drafter.draft_shape.num_draft_tokens <= length:
        return drafter
    if not isinstance(drafter, Shortens):
        raise ConfigurationError(f"{type(drafter).__name__} in a list has one length only; give one number as k")
    return drafter.shortened(length)
