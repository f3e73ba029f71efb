"""Several drafters in order: in every slot, the first that has something to say proposes.

A free drafter (n-grams, suffixes) in front of a model costs nothing where the text does not repeat, and spares the
model where it does. The model runs only in rounds in which some slot is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter, Guesses, Shortens, Varies
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors


class FallbackDrafter:
    """``drafters`` of chains that report no law; each proposes where all before it proposed nothing."""

    reads: FeatureSpec | None = None

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        if not drafters:
            raise ConfigurationError("a chain of drafters needs at least one")
        for one in drafters:
            if not one.draft_shape.is_chain or one.reads is not None:
                raise ConfigurationError(
                    f"{type(one).__name__} cannot stand in a chain of drafters, since it proposes trees or reads the "
                    "target's states; use it alone"
                )
        self._drafters = tuple(
            one for one in drafters if one.draft_shape.num_draft_tokens
        )  # others never have something to say
        self._guess = [one if isinstance(one, Guesses) else None for one in self._drafters]
        own = [
            one.draft_lengths if isinstance(one, Varies) else (one.draft_shape.num_draft_tokens,)
            for one in self._drafters
        ]
        self.draft_lengths = tuple(sorted({depth for each in own for depth in each})) or (0,)
        self.draft_shape = DraftShape.chain(self.draft_lengths[-1])
        # As far as the one that follows longest; the others are asked only as far as each of them follows.
        reaches = [one.max_positions for one in self._drafters]
        self.max_positions = (
            None if None in reaches else max((reach for reach in reaches if reach is not None), default=None)
        )

    def shortened(self, length: int) -> FallbackDrafter:
        """See `paceline.core.protocols.Shortens`. Each is shortened that proposes more.

        Raises:
            ConfigurationError: one of them has one depth only.
        """
        return FallbackDrafter(
            [one if one.draft_shape.num_draft_tokens <= length else _shortened(one, length) for one in self._drafters]
        )

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        for one in self._drafters:
            one.add_request(slot, prompt)

    def finish_request(self, slot: int) -> None:
        for one in self._drafters:
            one.finish_request(slot)

    def update(self, commit: Commit) -> None:
        for one in self._drafters:
            one.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        limits = bounds.max_accept.tolist()
        rows: list[list[int]] = [[] for _ in limits]  # of the slots in which somebody had something to say
        for one, guesses in zip(self._drafters, self._guess, strict=True):
            asked = [0 if row else limit for row, limit in zip(rows, limits, strict=True)]
            if one.max_positions is not None and bounds.max_rows + max(asked) > one.max_positions + 1:
                lengths = (commit.first_row + commit.count).tolist()
                room = [max(0, one.max_positions + 1 - length) for length in lengths]
                asked = [min(both) for both in zip(asked, room, strict=True)]
            if not any(asked):
                continue
            if guesses is not None:
                found = guesses.guess(asked)
            else:
                limit = bounds.max_accept if asked == limits else torch.tensor(asked, dtype=torch.int32)
                found = _proposed(one, commit, sampling=sampling, bounds=RoundLimits(limit, bounds.max_rows))
            rows = [row or said[:most] for row, said, most in zip(rows, found, asked, strict=True)]
        return Proposal.chains(rows, self.draft_lengths)


def _proposed(one: Drafter, commit: Commit, *, sampling: SamplingTensors, bounds: RoundLimits) -> list[list[int]]:
    """The chains of a drafter that gives tensors only."""
    found = one.propose(commit, sampling, bounds)
    if found.draft_probs is not None:
        raise ConfigurationError("drafters in a chain must not draw; use acceptor='match'")
    return [list(takewhile(lambda token: token >= 0, row)) for row in found.tokens.tolist()]


def _shortened(one: Drafter, length: int) -> Drafter:
    if not isinstance(one, Shortens):
        raise ConfigurationError(f"{type(one).__name__} in a chain has one depth only; give one number as k")
    return one.shortened(length)
