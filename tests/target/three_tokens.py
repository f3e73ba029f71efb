"""The first three tokens of thousands of slots, through the real verifier, drafters and rounds; no tests.

Models are tables whose distribution is known, and their caches check themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.errors import RequestError
from paceline.core.protocols import Drafter, Processor
from paceline.core.sampling import Sampling, param_row, seed_row
from paceline.core.types import PAD, Commit, DraftShape, RoundLimits, SamplingTensors
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.engine.request import LogitsRules
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.target.verifier import CompiledVerifier
from paceline.text.row_processing import RowProcessing
from tests.fakes import TableDecoder, WatchedRound, near, table

SLOTS, MANY, V, K = 50_000, 200_000, 8, 3
PROMPT = [2, 5, 1, 2, 5]
CHAIN = DraftShape.chain(K)
RoundsOf = Callable[[Drafter, TableDecoder, AcceptanceRule], Rounds]
TARGET = table(V, seed=0, spread=1.2)
DRAFT = near(TARGET, seed=1, spread=0.7)


def model(
    slots: int = SLOTS, *, drawn: bool, confidence_threshold: float = 0.0, logits: Tensor = DRAFT
) -> ModelDrafter:
    decoder, size = TableDecoder(logits, slots=slots, kv_buckets=(24,)), len(logits)
    vocabulary = VocabMap(size, size)
    return ModelDrafter(decoder, K, vocabulary=vocabulary, drawn=drawn, confidence_threshold=confidence_threshold)


class SlotText:
    """A text in a slot that never ends. A `paceline.core.protocols.HostText`."""

    def __init__(self, text: Sequence[int], processor: Processor | None = None) -> None:
        self.text, self.num_logprobs, self.output_scores = list(text), None, False
        self.num_prompt_logprobs = None
        self.processing = None if processor is None else RowProcessing(LogitsRules(processor), len(text))

    @property
    def prompt_length(self) -> int:
        return len(PROMPT)

    def append(self, token: int) -> bool:
        self.text.append(token)
        return False

    def fail(self, error: RequestError) -> None:
        raise error


@lru_cache(maxsize=1)
def seeds() -> Tensor:
    """Sampling parameters of MANY slots."""
    return torch.tensor([seed_row(seed + (77 << 32)) for seed in range(MANY)], dtype=torch.int32)


def one_depth(source: Drafter, target: TableDecoder, rule: AcceptanceRule) -> Rounds:
    return Rounds(source, {K: RoundPlan(source, CompiledVerifier(target, CHAIN, rule=rule, wide=True), K + 1)})


def three_tokens(
    source: Drafter,
    rule: AcceptanceRule,
    *,
    params: Sampling,
    slots: int = SLOTS,
    rounds_of: RoundsOf = one_depth,
    by_itself: bool = False,
    logits: Tensor = TARGET,
    prompt: Sequence[int] = PROMPT,
) -> tuple[np.ndarray, float]:
    """The first three tokens of every slot, and the mean number committed per round.

    ``by_itself``: how deep a slot may go next depends on how much it gained last, as a controller would have it.
    ``logits``: the target's table [V, V, V].
    """
    target = TableDecoder(logits, slots=slots, kv_buckets=(24,))
    bodies = [target.body] + ([source.decoder.body] if isinstance(source, ModelDrafter) else [])
    inner = getattr(source, "inner", source)
    for body in [*bodies, *([inner.decoder.body] if isinstance(inner, ModelDrafter) else [])]:
        body.cache[:, : len(prompt) - 1] = torch.tensor(prompt[:-1])
    if not isinstance(inner, ModelDrafter):
        for slot in range(slots):
            inner.add_request(slot, prompt[:-1])
    rounds = WatchedRound(rounds_of(source, target, rule), bodies)
    rounds.truth.text[:, : len(prompt)] = torch.tensor(prompt)
    rounds.truth.length[:] = len(prompt)
    first = torch.full((slots, K + 1), PAD, dtype=torch.int32)
    first[:, 0] = prompt[-1]
    ones = torch.ones(slots, dtype=torch.int32)
    commit = Commit(first, ones, ones * (len(prompt) - 1))
    sampling = SamplingTensors(torch.tensor([param_row(params)]).expand(slots, 4), seeds()[:slots])
    counts = []
    while int(rounds.truth.length.min()) < len(prompt) + 3:
        rows = int(rounds.truth.length.max())
        limit = (commit.count + 1).clamp(max=K) - 1 if by_itself else ones * source.draft_shape.num_draft_tokens
        commit = rounds(commit, sampling, RoundLimits(limit.tolist(), rows)).commit
        counts.append(float(commit.count.double().mean()))
    return rounds.truth.text[:, len(prompt) : len(prompt) + 3].numpy(), sum(counts) / len(counts)
