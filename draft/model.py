"""A smaller model as a drafter.

It re-reads the whole last commit at a fixed width, so it needs no stored length and no repair when all its drafts were
accepted. When the target samples, it chooses with the target's noise (coupled drafting), which keeps acceptance close
to the maximum; under `Reject` it samples from its probabilities with separate noise and reports them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core import reduce
from paceline.core.errors import ConfigurationError
from paceline.core.types import Commit, DraftKey, DraftShape, Proposal, RoundLimits, SamplingKind, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.options import DecoderOptions
from paceline.decoder.steps import prefill_in_chunks, window
from paceline.draft.drafted_tokens import Kept
from paceline.draft.heads import AutoregressiveHead, ChainStep, HeadDrafter, at_index
from paceline.draft.vocab_map import VocabMap


class ModelHead(AutoregressiveHead):
    """A whole model as a head; ``vocabulary`` maps between the target's ids and the model's."""

    def __init__(self, body: ModelWithCache, vocabulary: VocabMap, options: DecoderOptions) -> None:
        super().__init__(body.kernels, options)
        self.body, self.vocabulary = body, vocabulary

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return self.body.caches

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        return self.body.real_rows(sampling, window)

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        hidden, _ = self.body(self.vocabulary.known(tokens), place)
        return at_index(hidden, last)

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        state: Tensor = self.body(self.vocabulary.known(token), place)[0]
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.logits(self.body.logits(hidden))

    def sample_tokens(self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        if self.vocabulary.whole:  # a sharded model need not gather its logits
            return self.body.sample_tokens(hidden, positions, sampling)
        return super().sample_tokens(hidden, positions, sampling)


class ModelDrafter(HeadDrafter):
    """Drafts chains of ``k`` tokens with a decoder, or static trees: child r of a node is its token of rank r.

    vocabulary            between the target's ids and the decoder's
    drawn                 sample from the model's probabilities and report them, for `Reject`; otherwise choose with the
                          target's noise, for `Match`
    confidence_threshold  stop a proposal where the model's largest probability (no temperature, no filter) is below it
    """

    misfit_causes = "a model of another family; a chat template that only the target was trained with; too slow a draft"

    def __init__(
        self,
        decoder: CompiledDecoder,
        k: int | DraftShape,
        *,
        vocabulary: VocabMap,
        drawn: bool = False,
        confidence_threshold: float = 0.0,
    ) -> None:
        if not isinstance(confidence_threshold, (int, float)) or not 0 <= confidence_threshold <= 1:
            raise ConfigurationError(
                f"confidence_threshold: expected a probability from 0 (off) to 1, got {confidence_threshold!r}; "
                "correct it"
            )
        self._model = ModelHead(decoder.body, vocabulary, decoder.options)
        super().__init__(self._model, decoder, k)
        if confidence_threshold and not self.draft_shape.is_chain:
            raise ConfigurationError("confidence_threshold: expected 0 for a draft of trees; omit it, or the tree")
        self.vocabulary, self._drawn, self.confidence_threshold = vocabulary, drawn, confidence_threshold
        self._reports = False
        confidence = f", confidence {confidence_threshold}" if confidence_threshold else ""
        self._variant = f"vocabulary {vocabulary.name}{confidence}"

    @property
    def state(self) -> nn.Module:
        return self.decoder.body

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        if not self.draft_shape.is_chain:
            return super().step(bucket, kind)
        return ChainStep(self._model, self.draft_shape.num_draft_tokens, bucket, kept=self._kept, kind=kind)

    @property
    def _kept(self) -> Kept:
        return Kept(self._drawn, 0.0 if self._reports else self.confidence_threshold, self._reports)

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey("draft", self.draft_shape, bucket, self._drawn, self._variant)

    def propose_with_confidence(
        self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits
    ) -> tuple[Proposal, Tensor]:
        """Propose without a threshold. -> also the largest probability at every position, [B, k] float32, for
        comparison with a threshold. ConfigurationError: tokens are sampled from probabilities.
        """
        if self._drawn:
            raise ConfigurationError(
                "acceptor: expected 'match' for a drafter that does not report the probabilities it samples from, "
                "got another rule; use acceptor='match'"
            )
        reporting = copy.copy(self)
        reporting._reports, reporting._variant = True, f"vocabulary {self.vocabulary.name}, reports confidence"
        tokens, largest = reporting._outputs(commit, sampling, limits)
        return Proposal(tokens), largest

    def cache_key(self) -> dict[str, object]:
        return self.decoder.cache_key()

    def read_in_chunks(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        start: int = 0,
        features: Tensor | None = None,
        shared: bool = False,
    ) -> Generator[None, None, None]:
        """Prefill the target's tokens into a slot from a cache row on, in the model's prefill graphs."""
        chunks, ids = self.decoder.options.draft_chunks, self.vocabulary.ids(tokens)
        yield from prefill_in_chunks(self.decoder, slot, ids, start=start, chunks=chunks, shared=shared)

    def finish_request(self, slot: int) -> None:
        super().finish_request(slot)
        self.decoder.prefix_cache.finish(slot)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        super().move_request(slot, to, rows)
        self.decoder.prefix_cache.move(slot, to)

    def propose_allowed(
        self,
        commit: Commit,
        sampling: SamplingTensors,
        limits: RoundLimits,
        *,
        allowed: Callable[[int, list[int], int], Tensor | None],
    ) -> Proposal:
        """Draft one token after the other, chosen on the host among the allowed ones; of a tree, remove others."""
        if not self.draft_shape.is_chain:
            return super().propose_allowed(commit, sampling, limits, allowed=allowed)
        if self._drawn:
            return self.propose(commit, sampling, limits)
        del self._pending[-1:]  # it is read here
        self.catch_up()
        bucket, most = self.bucket(limits.max_rows), limits.max_accept
        read = partial(window, self.decoder, bucket=bucket, used_slots=limits.used_slots)
        logits, _ = read(self.vocabulary.known(commit.tokens), commit.first_row)
        logits = at_index(logits, commit.count - 1)
        drafts: list[list[int]] = [[] for _ in most]
        position = commit.first_row + commit.count  # of the token sampled next
        for index in range(min(self.draft_shape.num_draft_tokens, max(most))):
            if index:
                last = torch.tensor([[chain[-1]] for chain in drafts], dtype=torch.int32)
                logits, _ = read(self.vocabulary.known(last), position - 1)
            choices = self.vocabulary.logits(logits).clone()
            for slot, chain in enumerate(drafts):
                mask = allowed(slot, chain, choices.shape[-1]) if index < most[slot] else None
                if mask is not None:
                    choices[slot, 0].masked_fill_(~mask[: choices.shape[-1]], reduce.NEGATIVE)
            tokens = self.head.kernels.sample_tokens(choices, position.unsqueeze(1), sampling)
            for chain, token in zip(drafts, tokens.flatten().tolist(), strict=True):
                chain.append(token)
            position = position + 1
        return Proposal.chains(drafts, (self.draft_shape.num_draft_tokens,))
