"""Models, drafters and rules with a fault each, for `paceline verify` to find; no tests.

Models are tables of eight tokens, so that a whole test takes a second or so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.core import noise, reduce
from paceline.core.acceptance.base import TargetView
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.typical import Typical
from paceline.core.protocols import Drafter
from paceline.core.types import Accepted, Commit, DraftShape, Proposal, RoundLimits, SamplingTensors
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from tests.fakes import Around, TableBody, TableDecoder, near, table

V = 8
TARGET = table(V, seed=0, spread=1.2)
DRAFT = near(TARGET, seed=1, spread=0.7)


def target(body: type[TableBody] = TableBody, *, slots: int = 2) -> TableDecoder:
    """A table model, with a body of some kind."""
    made = TableDecoder(TARGET, slots=slots)
    made.body = body(TARGET, made.config, slots=slots, positions=made.kv_buckets[-1], slack=128)
    return made


def model(k: int = 3, *, slots: int = 2, logits: Tensor = DRAFT, drawn: bool = False) -> ModelDrafter:
    """A draft model over a table."""
    return ModelDrafter(TableDecoder(logits, slots=slots), k, vocabulary=VocabMap(V, V), drawn=drawn)


@dataclass(frozen=True, slots=True)
class AlwaysYes(Match):
    """Accepts whatever is drafted, and claims to be lossless."""

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        assert view.choices is not None
        drafted = torch.cat((proposal.tokens, view.choices[:, -1:]), 1)
        return Match.__call__(self, proposal, replace(view, choices=torch.where(drafted < 0, view.choices, drafted)))


@dataclass(frozen=True, slots=True)
class Plausible(Typical):
    """Typical acceptance that claims to be lossless."""

    lossless: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class FirstSlot(Match):
    """Decides in every slot by what the target says in the first."""

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        assert view.choices is not None
        return Match.__call__(self, proposal, replace(view, choices=view.choices[:1].expand_as(view.choices).clone()))


class ForgetsLastRow(TableBody):
    """A cache without the last row of a window: that of the last draft, if all are accepted."""

    def window(self, tokens: Tensor, row: Tensor, reach: int, **asked: Any) -> tuple[Tensor, Tensor | None]:
        out = super().window(tokens, row, reach, **asked)
        if tokens.shape[1] > 1:
            last = row.to(torch.int64) + tokens.shape[1] - 1
            self.cache[torch.arange(len(row)), last] = 0
        return out


class LaterNoise(TableBody):
    """Draws with the noise of the next position where it verifies."""

    def sample_tokens(
        self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors, *, used: Tensor | None = None
    ) -> Tensor:
        return super().sample_tokens(hidden, positions + (hidden.shape[1] > 1), sampling)


class Cooler(TableBody):
    """Another temperature where it verifies."""

    def logits(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        return super().logits(hidden) / (0.6 if hidden.shape[1] > 1 else 1.0)


class KeepsNoPath(TableBody):
    """Does not make the accepted path of a tree consecutive."""

    def compact_path(self, row: Tensor, path: Tensor) -> None:
        """The rows stay where the tree had them."""


class Tires(TableBody):
    """Gives other logits after some forwards: something of a request is left for the next one."""

    def logits(self, hidden: Tensor, real: Tensor | None = None) -> Tensor:
        return super().logits(hidden).roll(self.forwards // 40 % 2, -1)


class _Redrawn(Around):
    """A drawn draft model with other tokens in its proposals."""

    def __init__(self, k: int, *, slots: int) -> None:
        super().__init__(model(k, slots=slots, drawn=True))

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        proposal = self.inner.propose(commit, sampling, limits)
        assert proposal.draft_probs is not None
        return replace(proposal, tokens=self.tokens(commit, proposal.draft_probs, sampling))

    def tokens(self, commit: Commit, draft_probs: Tensor, sampling: SamplingTensors) -> Tensor:
        raise NotImplementedError


class ArgmaxAsDrawn(_Redrawn):
    """Drafts its likeliest tokens, and says that they were drawn."""

    def tokens(self, commit: Commit, draft_probs: Tensor, sampling: SamplingTensors) -> Tensor:
        return reduce.argmax(draft_probs)


class SharedNoise(_Redrawn):
    """Draws with the uniform numbers that acceptance is decided with."""

    def tokens(self, commit: Commit, draft_probs: Tensor, sampling: SamplingTensors) -> Tensor:
        positions = (commit.first_row + commit.count).unsqueeze(1)
        drawn = noise.uniform(sampling.seeds, positions, noise.ACCEPT).unsqueeze(-1)
        return (draft_probs.cumsum(-1) <= drawn).sum(-1).clamp(max=V - 1).to(torch.int32)


class BranchedGuess(Drafter):
    """A tree whose more probable half comes second, so that an accepted path is not consecutive."""

    draft_shape = DraftShape(4, 2, parents=(-1, -1, 0, 1))

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._texts[slot] = list(prompt)

    def finish_request(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def update(self, commit: Commit) -> None:
        for slot, text in self._texts.items():
            text += commit.tokens[slot, : int(commit.count[slot])].tolist()

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        rows = torch.zeros(len(commit.count), 4, dtype=torch.int32)
        for slot, text in self._texts.items():
            before, last = [0, *text][-2:]
            first = int(TARGET[before, last].argmax())
            second = int(TARGET[last, first].argmax())
            rows[slot] = torch.tensor([(first + 1) % V, first, second, second])
        return Proposal(rows, self.draft_shape.parents)
