"""A drafter and a verifier that sleep in place of computing and know the text; for `benchmarks.placement`."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.protocols import Drafter, Reading, Verifier
from paceline.core.types import PAD, Commit, DraftShape, PrefillResult, Proposal, RoundLimits, SamplingTensors
from paceline.placement.lookahead import LookaheadDrafter
from paceline.placement.remote.messages import Handshake
from paceline.placement.remote.server import UnpooledDrafters

V, K = 1000, 4


def truth(position: int) -> int:
    """The text: a token for every position."""
    return (position * 7919 + 13) % V


def right(position: int, alpha: float) -> bool:
    """Whether the drafter knows this one: with probability alpha, the same in every run."""
    return random.Random(position).random() < alpha


def known(position: int, alpha: float, beta: float) -> int:
    """The drafter's second choice: what the first was not, with probability beta where that was wrong."""
    if right(position, alpha) or random.Random(f"second {position}").random() >= beta:
        return (truth(position) + 2) % V
    return truth(position)


def near(position: int, alpha: float) -> bool:
    """Whether its two choices score alike: so it is with 4 of 5 errors, and of those places it knows 13 in 20."""
    share = 0.8 if not right(position, alpha) else 0.8 * (1 - alpha) / alpha * 13 / 7
    return random.Random(f"near {position}").random() < share


def until(end: float) -> None:
    """Sleep. What a sleeper does itself is part of its time, as it is with a model, wherever it runs."""
    time.sleep(max(0.0, end - time.perf_counter()))


class SleepingDrafter(Drafter):
    """Proposes the text, with errors, after a while."""

    max_positions = reads = None

    def __init__(self, nodes: int, seconds: float, alpha: float) -> None:
        self.draft_shape, self._seconds, self._alpha = DraftShape.chain(nodes), seconds, alpha

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None: ...

    def finish_request(self, slot: int) -> None: ...

    def update(self, commit: Commit) -> None: ...

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        end = time.perf_counter() + self._seconds
        first = int(commit.first_row[0] + commit.count[0])
        places = range(first, first + self.draft_shape.num_draft_tokens)
        row = [truth(p) if right(p, self._alpha) else (truth(p) + 1) % V for p in places]
        made = Proposal(torch.tensor([row], dtype=torch.int32))
        until(end)
        return made


class SleepingReviews:
    """Its second choices, after as long as it takes for a token."""

    def __init__(self, seconds: float, alpha: float, beta: float) -> None:
        self._seconds, self._alpha, self._beta = seconds, alpha, beta

    def reread(self, commit: Commit, rows: int) -> None:
        until(time.perf_counter() + self._seconds)

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        end = time.perf_counter() + self._seconds
        first, nodes = int(commit.first_row[0] + commit.count[0]), drafts.shape[1]
        places = range(first, first + nodes)
        row = [known(p, self._alpha, self._beta) for p in places]
        gaps = [0.1 if near(p, self._alpha) else 2.5 for p in places]
        until(end)
        return [row], [gaps]


class SleepingVerifier(Verifier):
    """Accepts what is the text, after a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        yield from ()  # nothing to read, and no pause
        return PrefillResult(truth(len(prompt)))

    def finish_request(self, slot: int) -> None: ...

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, bounds: RoundLimits
    ) -> Commit:
        end = time.perf_counter() + self._seconds
        start = int(commit.first_row[0] + commit.count[0])
        drafts = [] if proposal is None else proposal.tokens[0].tolist()
        count = 0
        while count < len(drafts) and drafts[count] == truth(start + count):
            count += 1
        row = [truth(start + i) for i in range(count + 1)] + [PAD] * (K - count)
        tokens = torch.tensor([row], dtype=torch.int32)
        made = Commit(tokens, torch.tensor([count + 1], dtype=torch.int32), commit.first_row + commit.count)
        until(end)
        return made


def sleeper(settings: Mapping[str, object]) -> UnpooledDrafters:
    """The maker of the drafter's process."""
    seconds, alpha = (float(str(settings[name])) for name in ("seconds", "alpha"))
    ahead, beta = bool(settings["ahead"]), settings["beta"]

    def make(_: Handshake) -> Drafter:
        inner = SleepingDrafter(K + ahead, seconds, alpha)
        reviews = None if beta is None else SleepingReviews(seconds / (K + 1), alpha, float(str(beta)))
        return LookaheadDrafter(inner, reviews) if ahead else inner

    return UnpooledDrafters(make)
