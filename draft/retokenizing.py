"""A draft model with another tokenizer: draft and target exchange text.

The committed ids are decoded to text and encoded to ids of the draft model; its drafts are decoded to text and encoded
to ids of the target; those that continue the committed ids are proposed. This is universal assisted generation (Moshe
et al., Hugging Face, 2024; transformers' AssistedCandidateGeneratorDifferentTokenizers).

The two vocabularies have no ids in common, so drafts cannot be coupled to the target's noise: they are the draft's most
likely tokens, at any temperature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from paceline.core.detokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer, plain_text
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.base import BatchTextDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap

_CONTEXT = 8
"""Tokens of context to encode or decode new text with: how a word is split depends on what is before it."""

_TAIL = 64
"""Minimum number of tokens at the end of a draft's text that are encoded again in every round; usually at most twice
this.
"""


class TargetText:
    """The target's side: the text of its ids so far, and which ids may follow."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        cut = max(0, len(prompt) - _CONTEXT)
        while cut and plain_text(tokenizer, list(prompt[max(0, cut - _CONTEXT) : cut])).endswith(REPLACEMENT):
            cut -= 1  # not inside a character
        head, tail = list(prompt[:cut]), prompt[cut:]
        self._tokenizer, self._detokenizer = tokenizer, IncrementalDetokenizer(tokenizer, head)
        self.text = plain_text(tokenizer, head)
        """The settled text: it never ends inside a character."""
        self._pieces: deque[tuple[list[int], str]] = deque(maxlen=_CONTEXT)
        self._unfinished: list[int] = []  # ids of a character that is not complete
        self.extend(tail)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            piece = self._detokenizer.push(token)
            self._unfinished.append(token)
            finished = len(self._unfinished) - self._detokenizer.held
            if finished:
                self._pieces.append((self._unfinished[:finished], piece))
                self.text, self._unfinished = self.text + piece, self._unfinished[finished:]

    def continuation(self, text: str) -> list[int] | None:
        """Return ids that continue the committed ones and decode to ``text``, which follows the settled text; None if
        none do.

        The new text is encoded together with some of the old, and the ids must begin with the committed ones; this is
        tried with less and less of the old text, since a model may split a word as its tokenizer never does.
        """
        pieces = list(self._pieces)
        for first in range(len(pieces) + 1):
            old = pieces[first:]
            committed = [*chain(*(one for one, _ in old)), *self._unfinished]
            ids = self._encode("".join(piece for _, piece in old) + text)
            added = ids[len(committed) :]
            if ids[: len(committed)] == committed and self._adds(old or pieces[-1:], added, text):
                return added
        return None

    def _adds(self, old: list[tuple[list[int], str]], ids: list[int], text: str) -> bool:
        """Whether ``ids`` add ``text`` to old text: a tokenizer may lose the first space of what it decodes."""
        before = "".join(piece for _, piece in old)
        both = plain_text(self._tokenizer, [*chain(*(one for one, _ in old)), *self._unfinished, *ids])
        return both in (before + text, before.removeprefix(" ") + text)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class DraftText:
    """Draft-side ids of a growing text. Only ids that may still change are encoded again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        self._settled = [] if bos is None or tokenizer.encode("")[:1] != [bos] else [bos]
        self._settled_size = 0  # characters of the settled ids

    def ids(self, text: str) -> list[int]:
        tail = text[self._settled_size :]
        tail_ids = self._tokenizer.encode(tail, add_special_tokens=False)
        ids = [*self._settled, *tail_ids]
        if len(tail_ids) > 2 * _TAIL:
            self._settle(tail, tail_ids)
        return ids

    def decode_drafts(self, ids: list[int], drafts: list[int]) -> str:
        """The text of drafts that follow the ids, as far as characters are complete."""
        context = ids[-_CONTEXT:]
        before, both = (plain_text(self._tokenizer, part) for part in (context, context + drafts))
        return both[len(before) :].split(REPLACEMENT)[0] if both.startswith(before) else ""

    def _settle(self, tail: str, tail_ids: list[int]) -> None:
        """Find a position from which on the text, encoded separately, gives the same ids."""
        size = len(plain_text(self._tokenizer, tail_ids))
        for cut in range(len(tail_ids) - _TAIL, len(tail_ids) - 2 * _TAIL, -1):
            start = len(tail) - size + len(plain_text(self._tokenizer, tail_ids[:cut]))
            if not 0 < start < len(tail):
                continue
            if self._tokenizer.encode(tail[start:], add_special_tokens=False) == tail_ids[cut:]:
                self._settled += tail_ids[:cut]
                self._settled_size += start
                return


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The tokenizers of both sides."""

    target: Tokenizer
    draft: Tokenizer


@dataclass(slots=True)
class RetokenizedText:
    """State of a slot. ``cached``: the draft's ids whose keys and values are in rows 0, 1, ... of its cache."""

    target: TargetText
    draft: DraftText
    cached: list[int] = field(default_factory=list)

    def draft_ids(self) -> list[int]:
        return self.draft.ids(self.target.text)


class RetokenizingDrafter(BatchTextDrafter[RetokenizedText]):
    """Drafts ``k`` tokens of the draft model per round and proposes at most ``k`` of the target's.

    tokenizers            of both sides
    eos                   the target's eos id, proposed where the draft samples its own; None = never
    confidence_threshold  as in `paceline.draft.model.ModelDrafter`

    The maximum length of a sequence is in the draft's ids; past it nothing is proposed.
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

    def shortened(self, length: int) -> Self:
        shorter = super().shortened(length)
        shorter._model = self._model.shortened(length)
        return shorter

    def new_text(self, prompt: Sequence[int]) -> RetokenizedText:
        return RetokenizedText(TargetText(self._tokenizers.target, prompt), DraftText(self._tokenizers.draft))

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        super().add_request(slot, prompt)
        ids = self._texts[slot].draft_ids()
        if self._fits(ids):
            self._read(slot, ids)

    def extend(self, text: RetokenizedText, tokens: Sequence[int]) -> None:
        text.target.extend(tokens)

    def chains(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> list[list[int]]:
        texts = {slot: text.draft_ids() for slot, text in self._texts.items()}
        texts = {slot: ids for slot, ids in texts.items() if self._fits(ids)}
        slots, k = len(limits.max_accept), self.draft_shape.num_draft_tokens
        drafts = self._draft(texts, slots)
        return [self._target_ids(slot, texts[slot], drafts[slot])[:k] if slot in texts else [] for slot in range(slots)]

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Move the text and the draft's cache rows, whose number is the draft's."""
        if slot in self._texts:
            self._model.move_request(slot, to, max(1, len(self._texts[slot].cached)))
        super().move_request(slot, to, rows)

    def _fits(self, ids: list[int]) -> bool:
        """Return whether there are tokens to read, and positions for them and for the drafts."""
        return 0 < len(ids) <= self._decoder.n_positions - self.draft_shape.num_draft_tokens

    def _draft(self, texts: dict[int, list[int]], slots: int) -> list[list[int]]:
        """The likeliest ids of the draft after its ids of every slot; slots without any idle at row 0."""
        tokens = torch.full((slots, self._width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        count, first_row = torch.ones(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
        for slot, text in self._texts.items():
            if slot not in texts:
                text.cached = []  # the idle slot's token will overwrite it
        for slot, ids in texts.items():
            begin = self._read(slot, ids)
            tokens[slot, : len(ids) - begin] = torch.tensor(ids[begin:], dtype=torch.int32)
            count[slot], first_row[slot] = len(ids) - begin, begin
        greedy = sampling_tensors([Sampling()] * slots)
        k = self.draft_shape.num_draft_tokens
        limits = RoundLimits(
            [k] * slots,
            max((len(ids) for ids in texts.values()), default=1),
            used_slots=max(texts, default=0) + 1,
        )
        proposal = self._model.propose(Commit(tokens, count, first_row), greedy, limits).tokens.tolist()
        drafts = [row[: row.index(PAD)] if PAD in row else row for row in proposal]
        for slot, ids in texts.items():  # the last draft was never read
            self._texts[slot].cached = [*ids, *drafts[slot][: k - 1]]
        return drafts

    def _read(self, slot: int, ids: list[int]) -> int:
        """Prefill what differs from the cache, except the part that fits into a commit. Return the row where that part
        begins.
        """
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
        text, ends = self._texts[slot], self._decoder.config.eos_token_ids
        length = next((i for i, token in enumerate(drafts) if token in ends), len(drafts))
        continuation = text.target.continuation(text.draft.decode_drafts(ids, drafts[:length]))
        if continuation is None:
            return []
        return [*continuation, self._eos] if length < len(drafts) and self._eos is not None else continuation
