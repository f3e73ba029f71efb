"""Propose what followed the longest repetition of the text's end, in the text itself or in earlier outputs, with the
changes that were made in it so far.

Prompt lookup without a largest n-gram. The idea of drafting from suffix structures over past outputs is that of SAM
decoding (Hu et al., arXiv 2411.10666) and SuffixDecoding (Oliaro et al., arXiv 2411.04975).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.draft.copy_tracker import CopyTracker
from paceline.draft.suffix_index import SuffixAutomaton

_HALVED = 4  # proposals of at least so many tokens may be halved
_BORDER = -2  # between two outputs in the corpus; no token is negative, so nothing matches across it


class Corpus:
    """Earlier outputs, at most ``size`` tokens; when they are too many, the older half is dropped.

    ``generation`` changes whenever states of the old automaton mean nothing any more.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigurationError(f"a corpus of {size} tokens holds nothing; give 1 or more, or no corpus")
        self._size, self.generation = size, 0
        self.automaton = SuffixAutomaton()

    def add(self, tokens: Sequence[int]) -> None:
        """A finished text."""
        for token in (*tokens, _BORDER):
            self.automaton.append(token)
        if len(self.automaton.tokens) > self._size:
            kept = self.automaton.tokens[len(self.automaton.tokens) - self._size // 2 :]
            self.automaton, self.generation = SuffixAutomaton(), self.generation + 1
            for token in kept:
                self.automaton.append(token)


@dataclass(slots=True)
class _Text:
    """A slot's text, what it repeats, and how much of its end stands in the corpus."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    repeats: CopyTracker = field(default_factory=CopyTracker)
    generation: int = -1
    state: int = 0
    length: int = 0


class SuffixDrafter:
    """Drafts chains of up to ``length`` tokens behind repetitions of at least ``shortest`` tokens.

    No more than ``factor`` tokens for each token that is repeated: a short repetition tells little, and the little that
    it proposes is verified in a smaller graph. SuffixDecoding has such a maximum too, of 1 to 4.
    A token that differs does not end a repetition, and is changed again where it comes again (`CopyTracker`).
    ``corpus``: None = the text alone; a number = also that many tokens of earlier outputs of this drafter, which all
    its requests share. The text itself wins unless the corpus knows a longer repetition.
    """

    reads: FeatureSpec | None = None
    max_positions: int | None = None

    def __init__(self, length: int, *, shortest: int = 2, factor: float = 2.0, corpus: int | None = None) -> None:
        if shortest < 1:
            raise ConfigurationError(f"shortest={shortest} tokens repeat nothing; give 1 or more")
        if not shortest * factor >= 1:
            raise ConfigurationError(
                f"factor={factor} leaves a repetition of {shortest} tokens without a draft; give more"
            )
        self.draft_shape = DraftShape.chain(length)
        self._shortest, self._factor = shortest, factor
        self._corpus = None if corpus is None else Corpus(corpus)
        self._texts: dict[int, _Text] = {}
        self._prompts: dict[int, int] = {}

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """See `paceline.core.protocols.Varies`."""
        nodes = self.draft_shape.num_draft_tokens
        return (nodes // 2, nodes) if nodes >= _HALVED else (nodes,)

    def shortened(self, length: int) -> SuffixDrafter:
        """See `paceline.core.protocols.Shortens`."""
        made = copy.copy(self)
        made.draft_shape = DraftShape.chain(length)
        return made

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._texts[slot] = _Text()
        self._prompts[slot] = len(prompt)
        self._extend(self._texts[slot], prompt)

    def finish_request(self, slot: int) -> None:
        text, prompt = self._texts.pop(slot, None), self._prompts.pop(slot, 0)
        if text is not None and self._corpus is not None:
            self._corpus.add(text.own.tokens[prompt:])

    def update(self, commit: Commit) -> None:
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            if slot in self._texts:
                self._extend(self._texts[slot], tokens[:count])

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        return Proposal.chains(self.guess(bounds.max_accept.tolist()), self.draft_lengths)

    def guess(self, limits: Sequence[int]) -> list[list[int]]:
        """See `paceline.core.protocols.Guesses`."""
        return [self._lookup(self._texts[slot]) if slot in self._texts else [] for slot in range(len(limits))]

    def _extend(self, text: _Text, tokens: Sequence[int]) -> None:
        for token in tokens:
            text.own.append(token)
        text.repeats.follow(tokens)
        if self._corpus is None:
            return
        if text.generation != self._corpus.generation:  # walk the end of the text again
            text.generation, text.state, text.length = self._corpus.generation, 0, 0
            tokens = text.own.tokens[-64:]
        for token in tokens:
            text.state, text.length = self._corpus.automaton.follow(text.state, text.length, token)

    def _lookup(self, text: _Text) -> list[int]:
        length, at = text.own.repeated()
        source = text.own.tokens
        if self._corpus is not None and text.generation == self._corpus.generation and text.length > length:
            length, at = text.length, self._corpus.automaton.behind(text.state)
            source = self._corpus.automaton.tokens
        if length > text.repeats.run:
            text.repeats.begin(source, at, length)
        length = text.repeats.run
        if length < self._shortest:
            return []
        found = text.repeats.ahead(int(min(self.draft_shape.num_draft_tokens, self._factor * length)))
        return found[: found.index(_BORDER)] if _BORDER in found else found
