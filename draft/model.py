"""A smaller model as a drafter.

It re-reads the whole last commit at a fixed width, so it needs no length of its own and no repair when all its drafts
were accepted. When the target samples, it picks with the target's own noise (coupled drafting), which keeps
acceptance close to the best possible; under `Reject` it draws from its law with noise of its own and reports the law.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core import noise, probs
from paceline.core.errors import ConfigurationError
from paceline.core.pending import PendingCommits
from paceline.core.types import PAD, Commit, DraftKey, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.steps import prefill
from paceline.draft.vocab_map import VocabMap


class DraftStep(nn.Module):
    """Read a commit, then ``length`` tokens one by one."""

    def __init__(
        self,
        body: ModelWithCache,
        reach: int,
        *,
        length: int,
        drawn: bool,
        vocabulary: VocabMap,
        confidence: float = 0.0,
    ) -> None:
        super().__init__()
        self.body, self._reach, self._length, self._drawn = body, reach, length, drawn
        self.vocabulary, self._confidence = vocabulary, confidence

    def forward(self, tokens: Tensor, count: Tensor, start: Tensor, knobs: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        """The fields of a Commit [B, W], knobs [B, 4], keys [B, 2] -> drafts [B, N] (and law [B, N, V] if drawn).

        From the first place on where the model is not confident enough, drafts are PAD.
        """
        sampling = SamplingTensors(knobs, keys)
        hidden, _ = self.body.window(self.vocabulary.known(tokens), start, self._reach)
        last = (count - 1).to(torch.int64).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
        hidden = hidden.gather(1, last)
        drafts: list[Tensor] = []
        laws: list[Tensor] = []
        sure: list[Tensor] = []
        for step in range(self._length):
            row = start + count + step  # of the token that is picked now
            if step:
                hidden, _ = self.body.window(self.vocabulary.known(drafts[-1]), row - 1, self._reach)
            if self.vocabulary.whole and not self._drawn and not self._confidence:
                drafts.append(self.body.sample_tokens(hidden, row.unsqueeze(1), sampling))
                continue
            logits = self.vocabulary.logits(self.body.logits(hidden)).contiguous()
            if self._confidence > 0:
                sure.append(probs.softmax(logits).amax(-1) >= self._confidence)
            stream = noise.DRAFT if self._drawn else noise.TARGET
            drafts.append(self.body.kernels.sample_tokens(logits, row.unsqueeze(1), sampling, stream=stream))
            if self._drawn:
                laws.append(self.body.kernels.probabilities(logits, sampling))
        tokens = torch.cat(drafts, 1)
        if sure:
            doubts = (~torch.cat(sure, 1)).to(torch.float32).cumsum(-1)
            tokens = torch.where(doubts == 0, tokens, PAD)
        return (tokens, torch.cat(laws, 1)) if self._drawn else (tokens,)


class ModelDrafter:
    """Drafts chains of ``length`` tokens with a decoder. A `paceline.core.protocols.TraceableDrafter`.

    ``drawn``: draw from the law and report it, for `Reject`; otherwise pick with the target's noise, for `Match`.
    ``vocabulary`` is between the target's ids and the decoder's.
    ``confidence``: stop a proposal where the model's largest probability (no temperature, no filter) falls below it.
    """

    reads: FeatureSpec | None = None

    def __init__(
        self,
        decoder: CompiledDecoder,
        k: int,
        *,
        vocabulary: VocabMap,
        drawn: bool = False,
        confidence_threshold: float = 0.0,
    ) -> None:
        if not isinstance(confidence_threshold, (int, float)) or not 0 <= confidence_threshold <= 1:
            raise ConfigurationError(
                f"confidence_threshold={confidence_threshold!r} is not a probability; give 0 (off) to 1"
            )
        decoder.check_width(k + 1)
        self._confidence = confidence = confidence_threshold
        self.decoder, self._drawn = decoder, drawn
        self._variant = f"vocabulary {vocabulary.name}{f', confidence {confidence}' if confidence else ''}"
        self.draft_shape = DraftShape.chain(k)
        self.vocabulary = vocabulary
        self.max_positions: int | None = decoder.n_positions
        self._backlog = PendingCommits()

    def shortened(self, length: int) -> ModelDrafter:
        """See `paceline.core.protocols.Shortens`."""
        made = copy.copy(self)
        made.draft_shape = DraftShape.chain(length)
        return made

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read a prompt, unless it is longer than this model's context: then nothing is ever asked of it."""
        self._backlog.forget(slot)
        if len(prompt) < self.decoder.n_positions:
            self.read(slot, prompt)

    def read(self, slot: int, tokens: Sequence[int], *, start: int = 0) -> None:
        """Read the target's tokens into a slot from a cache row on."""
        chunks = self.decoder.options.draft_chunks
        prefill(self.decoder, slot, self.vocabulary.ids(tokens), start=start, chunks=chunks)

    def finish_request(self, slot: int) -> None:
        """Its commits are of no interest any more; the next request's prompt overwrites the cache rows."""
        self._backlog.forget(slot)

    def update(self, commit: Commit) -> None:
        """Only noted: the step of `propose` reads the last commit itself."""
        self._backlog.add(commit)

    def catch_up(self) -> None:
        """Read what was committed while nothing was proposed, as far as this model's context goes."""
        for missed in self._backlog.take():
            if missed.first_row + len(missed.tokens) <= self.decoder.n_positions:
                self.read(missed.slot, missed.tokens, start=missed.first_row)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """Draft; see the protocol."""
        self.catch_up()
        inputs = (commit.tokens, commit.count, commit.first_row, sampling.params, sampling.seeds)
        bucket = self.bucket(bounds.max_rows)
        width = commit.tokens.shape[1]
        key = GraphKey("draft", width, bucket, commit_width=width, draft=self.step_key(bucket))
        out = self.decoder.graph(key, self._make, inputs)(*inputs)
        return Proposal(out[0], None, out[1] if self._drawn else None)

    @property
    def state(self) -> nn.Module:
        """See the protocol."""
        return self.decoder.body

    def bucket(self, rows: int) -> int:
        """See the protocol."""
        return self.decoder.bucket_for(rows + self.draft_shape.num_draft_tokens)

    def step(self, bucket: int) -> nn.Module:
        """See the protocol."""
        return self._make(self.decoder.body, bucket)

    def step_key(self, bucket: int) -> DraftKey:
        """See the protocol."""
        return DraftKey("draft", self.draft_shape, bucket, self._drawn, self._variant)

    def cache_key(self) -> dict[str, object]:
        """See the protocol."""
        return self.decoder.cache_key()

    @property
    def _make(self) -> partial[DraftStep]:
        return partial(
            DraftStep,
            length=self.draft_shape.num_draft_tokens,
            drawn=self._drawn,
            vocabulary=self.vocabulary,
            confidence=self._confidence,
        )
