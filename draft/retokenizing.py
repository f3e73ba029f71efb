"""A draft model with a tokenizer of its own: draft and target exchange text.

The committed ids become text and the text becomes ids of the draft model; what the draft model drafts becomes text and
then ids of the target, of which those are proposed that continue the committed ids. This is universal assisted
generation (Moshe et al., Hugging Face, 2024; transformers' AssistedCandidateGeneratorDifferentTokenizers). The output
does not depend on it: proposals are verified like any other.

The two vocabularies have no ids in common, so drafts cannot be coupled to the target's noise: they are the draft's
likeliest tokens, at any temperature. Not here: strings (`paceline.draft.retokenize_text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.detokenizer import Tokenizer
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.base import BatchTextDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.retokenize_text import DraftText, TargetText
from paceline.draft.vocab_map import VocabMap


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The tokenizers of both sides, with Hugging Face's ``encode`` and ``decode``."""

    target: Tokenizer
    draft: Tokenizer


@dataclass(slots=True)
class RetokenizedText:
    """A slot's text. ``cached``: the draft's ids whose keys and values are in the rows 0, 1, ... of its cache."""

    target: TargetText
    draft: DraftText
    cached: list[int] = field(default_factory=list)

    def draft_ids(self) -> list[int]:
        """The whole text in the draft's ids."""
        return self.draft.ids(self.target.text)


class RetokenizingDrafter(BatchTextDrafter[RetokenizedText]):
    """Drafts ``k`` tokens of the draft model a round and proposes at most as many of the target's.

    tokenizers            of both sides
    eos                   the target's id for the end of a text, proposed where the draft says its own; None = never
    confidence_threshold  as of `paceline.draft.model.ModelDrafter`

    How far the draft follows depends on its own ids; past that it proposes nothing.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        k: int,
        *,
        tokenizers: TokenizerPair,
        eos: int | None = None,
        confidence_threshold: float = 0.0,
    ) -> None:
        super().__init__(k)
        size = decoder.config.vocab_size
        vocabulary = VocabMap(size, size)
        self._model = ModelDrafter(decoder, k, vocabulary=vocabulary, confidence_threshold=confidence_threshold)
        self._decoder, self._tokenizers, self._eos = decoder, tokenizers, eos
        self._width = k + 1  # of the commits that the draft reads

    def shortened(self, length: int) -> RetokenizingDrafter:
        """See `paceline.core.protocols.Shortens`."""
        shorter = super().shortened(length)
        shorter._model = self._model.shortened(length)
        return shorter

    def new_text(self, prompt: Sequence[int]) -> RetokenizedText:
        return RetokenizedText(TargetText(self._tokenizers.target, prompt), DraftText(self._tokenizers.draft))

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read a prompt, in the draft's ids."""
        super().add_request(slot, prompt)
        ids = self._texts[slot].draft_ids()
        if self._fits(ids):
            self._read(slot, ids)

    def extend(self, text: RetokenizedText, tokens: Sequence[int]) -> None:
        """Only the text grows; the draft model reads what it has not read when it has to propose."""
        text.target.extend(tokens)

    def guess(self, limits: Sequence[int]) -> list[list[int]]:
        """See `paceline.core.protocols.Guesses`."""
        texts = {slot: text.draft_ids() for slot, text in self._texts.items()}
        texts = {slot: ids for slot, ids in texts.items() if self._fits(ids)}
        drafts = self._draft(texts, len(limits))
        k, rows = self.draft_shape.num_draft_tokens, []
        for slot in range(len(limits)):
            rows.append(self._target_ids(slot, texts[slot], drafts[slot])[:k] if slot in texts else [])
        return rows

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`. The draft's text has a length of its own."""
        if slot in self._texts:
            self._model.move_request(slot, to, max(1, len(self._texts[slot].cached)))
        super().move_request(slot, to, rows)

    def _fits(self, ids: list[int]) -> bool:
        """Whether there is something to read, and room for it and for the drafts."""
        return 0 < len(ids) <= self._decoder.n_positions - self.draft_shape.num_draft_tokens

    def _draft(self, texts: dict[int, list[int]], slots: int) -> list[list[int]]:
        """The likeliest ids of the draft after its ids of every slot; slots without any idle at row 0."""
        tokens = torch.full((slots, self._width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        count, first_row = torch.ones(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
        for slot, text in self._texts.items():
            if slot not in texts:
                text.cached = []  # the idle slot's token is about to be written over it
        for slot, ids in texts.items():
            begin = self._read(slot, ids)
            tokens[slot, : len(ids) - begin] = torch.tensor(ids[begin:], dtype=torch.int32)
            count[slot], first_row[slot] = len(ids) - begin, begin
        greedy = sampling_tensors([Sampling()] * slots)
        k = self.draft_shape.num_draft_tokens
        limits = RoundLimits(
            torch.full((slots,), k, dtype=torch.int32),
            max((len(ids) for ids in texts.values()), default=1),
            used_slots=max(texts, default=0) + 1,
        )
        proposal = self._model.propose(Commit(tokens, count, first_row), greedy, limits).tokens.tolist()
        drafts = [row[: row.index(PAD)] if PAD in row else row for row in proposal]
        for slot, ids in texts.items():  # the last draft was never read
            self._texts[slot].cached = [*ids, *drafts[slot][: k - 1]]
        return drafts

    def _read(self, slot: int, ids: list[int]) -> int:
        """Read what differs from the cache, but for what fits into a commit. Returns the row where that begins."""
        text = self._texts[slot]
        differs = next((i for i, (a, b) in enumerate(zip(ids, text.cached, strict=False)) if a != b), None)
        begin = min(len(ids), len(text.cached)) if differs is None else differs
        begin = min(begin, len(ids) - 1)
        if len(ids) - begin > self._width:
            end = len(ids) - self._width
            self._model.read(slot, ids[begin:end], start=begin)
            text.cached, begin = ids[:end], end
        return begin

    def _target_ids(self, slot: int, ids: list[int], drafts: list[int]) -> list[int]:
        """The target's ids for the draft's."""
        text, ends = self._texts[slot], self._decoder.config.eos_token_ids
        length = next((i for i, token in enumerate(drafts) if token in ends), len(drafts))
        continuation = text.target.continuation(text.draft.decode_drafts(ids, drafts[:length]))
        if continuation is None:
            return []
        return [*continuation, self._eos] if length < len(drafts) and self._eos is not None else continuation
