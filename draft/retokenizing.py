"""A draft model with a tokenizer of its own: draft and target exchange text.

The committed ids become text, the text ids of the draft; the draft's drafts become text, and that ids of the target,
of which those are proposed that continue what is committed. This is universal assisted generation (Moshe et al.,
Hugging Face, 2024; transformers' AssistedCandidateGeneratorDifferentTokenizers). Nothing the text is made of depends on
it: proposals are verified like any other.

The two vocabularies have no ids in common, so drafts cannot be coupled to the target's noise: they are the draft's
likeliest tokens, at any temperature. Not here: strings (`paceline.draft.retokenize_text`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.detokenizer import Tokenizer
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.model import ModelDrafter
from paceline.draft.retokenize_text import DraftText, TargetText
from paceline.draft.vocab_map import VocabMap


@dataclass(frozen=True, slots=True)
class TokenizerPair:
    """The tokenizers of both sides, with Hugging Face's ``encode`` and ``decode``."""

    target: Tokenizer
    draft: Tokenizer


@dataclass(slots=True)
class _Text:
    """A slot's text. ``cached``: the draft's ids whose keys and values lie in the rows 0, 1, ... of its cache."""

    committed: TargetText
    encoded: DraftText
    cached: list[int] = field(default_factory=list)


class RetokenizingDrafter:
    """Drafts ``length`` tokens of the draft a round; proposed are at most as many of the target's.

    tokenizers  of both sides
    eos         the target's id for the end of a text, proposed where the draft says its own; None = nothing is
    confidence  as of `paceline.draft.model.ModelDrafter`
    """

    reads: FeatureSpec | None = None
    max_positions: int | None = None
    """How far the draft follows depends on its own ids; past that it proposes nothing."""

    def __init__(
        self,
        decoder: CompiledDecoder,
        length: int,
        *,
        tokenizers: TokenizerPair,
        eos: int | None = None,
        confidence: float = 0.0,
    ) -> None:
        size = decoder.config.vocab_size
        self._model = ModelDrafter(decoder, length, vocabulary=VocabMap(size, size), confidence=confidence)
        self._decoder, self._tokenizers, self._eos = decoder, tokenizers, eos
        self._width = length + 1  # of the commits that the draft reads
        self.draft_shape = DraftShape.chain(length)
        self._texts: dict[int, _Text] = {}

    def shortened(self, length: int) -> RetokenizingDrafter:
        """See `paceline.core.protocols.Shortens`."""
        made = copy.copy(self)
        made.draft_shape, made._model = DraftShape.chain(length), self._model.shortened(length)
        return made

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read a prompt, in the draft's ids."""
        text = _Text(TargetText(self._tokenizers.target, prompt), DraftText(self._tokenizers.draft))
        self._texts[slot] = text
        ids = text.encoded.ids(text.committed.text)
        if self._follows(ids):
            self._read(slot, text, ids)

    def finish_request(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def update(self, commit: Commit) -> None:
        """Only the text grows; what the draft has not read it reads when it is asked."""
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            if slot in self._texts:
                self._texts[slot].committed.extend(tokens[:count])

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """Draft; see the protocol."""
        slots, nodes = len(commit.tokens), self.draft_shape.num_draft_tokens
        known = {slot: text.encoded.ids(text.committed.text) for slot, text in self._texts.items()}
        known = {slot: ids for slot, ids in known.items() if self._follows(ids)}
        drafts = self._drafts(known, slots)
        tokens = torch.full((slots, nodes), PAD, dtype=torch.int32)
        for slot, ids in known.items():
            found = self._translated(self._texts[slot], ids, drafts[slot])[:nodes]
            tokens[slot, : len(found)] = torch.tensor(found, dtype=torch.int32)
        return Proposal(tokens)

    def _follows(self, ids: list[int]) -> bool:
        """Whether there is something to read, and room for it and for the drafts."""
        return 0 < len(ids) <= self._decoder.n_positions - self.draft_shape.num_draft_tokens

    def _drafts(self, known: dict[int, list[int]], slots: int) -> list[list[int]]:
        """The likeliest ids of the draft behind its ids of every slot; slots without any idle at row 0."""
        tokens = torch.full((slots, self._width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        count, start = torch.ones(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
        for slot, text in self._texts.items():
            if slot not in known:
                text.cached = []  # overwritten in a moment
        for slot, ids in known.items():
            begin = self._read(slot, self._texts[slot], ids)
            tokens[slot, : len(ids) - begin] = torch.tensor(ids[begin:], dtype=torch.int32)
            count[slot], start[slot] = len(ids) - begin, begin
        greedy = sampling_tensors([Sampling()] * slots)
        longest = max((len(ids) for ids in known.values()), default=1)
        bounds = RoundLimits(torch.full((slots,), self.draft_shape.num_draft_tokens, dtype=torch.int32), longest)
        made = self._model.propose(Commit(tokens, count, start), greedy, bounds).tokens.tolist()
        found = [row[: row.index(PAD)] if PAD in row else row for row in made]
        for slot, ids in known.items():  # the last draft was never read
            self._texts[slot].cached = [*ids, *found[slot][: self.draft_shape.num_draft_tokens - 1]]
        return found

    def _read(self, slot: int, text: _Text, ids: list[int]) -> int:
        """Read what differs from the cache, all but what fits a commit. -> the row where that commit begins."""
        same = next((i for i, (a, b) in enumerate(zip(ids, text.cached, strict=False)) if a != b), None)
        begin = min(len(ids), len(text.cached)) if same is None else same
        begin = min(begin, len(ids) - 1)
        if len(ids) - begin > self._width:
            end = len(ids) - self._width
            self._model.read(slot, ids[begin:end], start=begin)
            text.cached, begin = ids[:end], end
        return begin

    def _translated(self, text: _Text, ids: list[int], drafts: list[int]) -> list[int]:
        """The target's ids for the draft's."""
        ends = self._decoder.config.eos_token_ids
        said = next((i for i, token in enumerate(drafts) if token in ends), len(drafts))
        found = text.committed.continued(text.encoded.says(ids, drafts[:said]))
        if found is None:
            return []
        return [*found, self._eos] if said < len(drafts) and self._eos is not None else found
