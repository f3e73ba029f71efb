"""Propose what followed the longest repetition of the sequence's end, in the sequence or in earlier outputs, with the
changes made in it so far.

Prompt lookup without a maximum n-gram. The idea of drafting from suffix structures over past outputs is that of SAM
decoding (Hu et al., arXiv 2411.10666) and SuffixDecoding (Oliaro et al., arXiv 2411.04975); that of a file of texts to
draft from, REST (He et al., arXiv 2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import ConfigurationError
from paceline.draft.base import TextDrafter

_CHANGE_FACTOR = 8
"""Divisor of a repetition's length at a change: most short repetitions end where a token differs, most long ones
continue. Chosen among 2, 4 and 8 by replaying outputs of the demo target and copies with changed names.
"""


class CopyTracker:
    """Repetition in one sequence. ``run``: tokens repeated so far, less those lost by changes; 0 = no repetition.

    A repetition does not end where one token differs: a file that is repeated with another name continues as before,
    and the name is replaced wherever it occurs.
    """

    def __init__(self) -> None:
        self.run = 0
        self._source: Sequence[int] = ()
        self._next = 0  # index in the source of the token that should come next
        self._changes: dict[int, int] = {}  # token of the source -> the token that replaces it
        self._unconfirmed: tuple[int, int] | None = None  # a change that no repeated token has followed yet

    def begin(self, source: Sequence[int], start: int, run: int) -> None:
        """Start of a repetition: the last ``run`` tokens of it occur in a source and continue at ``start``."""
        self._source, self._next, self.run, self._unconfirmed = source, start, run, None

    def follow(self, tokens: Sequence[int]) -> None:
        """Append tokens. Two tokens in a row that differ from the source end the repetition."""
        for token in tokens:
            if not self.run or self._next >= len(self._source):
                self.run = 0
                return
            expected = self._source[self._next]
            self._next += 1
            if expected < 0:  # no token: the source ends here
                self.run = 0
                return
            if token not in (expected, self._changes.get(expected)):
                self.run = 0 if self._unconfirmed else max(1, self.run // _CHANGE_FACTOR)
                self._unconfirmed = (expected, token)
                continue
            if token == expected:
                self._changes.pop(expected, None)  # it is not changed everywhere
            if self._unconfirmed:
                self._changes[self._unconfirmed[0]], self._unconfirmed = self._unconfirmed[1], None
            self.run += 1

    def ahead(self, count: int) -> list[int]:
        """Return the next tokens if the repetition continues, with the same changes."""
        return [self._changes.get(token, token) for token in self._source[self._next : self._next + count]]


_MAX_LINKS = 32  # limit when ends are updated; longer chains come from sequences that repeat one token


class SuffixAutomaton:
    """One growing sequence. A state represents all substrings that end at the same positions.

    It grows by one token at a time (Blumer et al., 1985), represents every substring in at most twice as many states as
    tokens, and finds the longest suffix that occurred before, whatever its length.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]  # index after the last known occurrence that is older than the newest token
        self._last = 0

    def append(self, token: int) -> None:
        """Append a token; constant time on average."""
        self._update_ends()
        self.tokens.append(token)
        state = self._state({}, self._length[self._last] + 1, len(self.tokens))
        parent = self._last
        while parent != -1 and token not in self._next[parent]:
            self._next[parent][token] = state
            parent = self._link[parent]
        self._last = state
        if parent == -1:
            self._link[state] = 0
            return
        old = self._next[parent][token]
        if self._length[old] == self._length[parent] + 1:
            self._link[state] = old
            return
        clone = self._state(dict(self._next[old]), self._length[parent] + 1, self._end[old])
        self._link[clone] = self._link[old]
        while parent != -1 and self._next[parent].get(token) == old:
            self._next[parent][token] = clone
            parent = self._link[parent]
        self._link[old] = self._link[state] = clone

    def repeated(self) -> tuple[int, int]:
        """The longest end of the text that occurred before: its length, and where its continuation begins."""
        state = self._link[self._last]
        return (0, 0) if state <= 0 else (self._length[state], self._end[state])

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Append a token to another sequence, whose last ``length`` tokens are those of ``state``; begin with (0, 0).

        Returns the state and the length of the longest suffix, the token included, that this sequence contains.
        """
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        after = self._next[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def end_of(self, state: int) -> int:
        """Return the index after the last known occurrence of this state."""
        return self._end[state]

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def _update_ends(self) -> None:
        """Set the last occurrence of every end of the sequence. Called before the sequence grows."""
        state, steps, end = self._last, 0, len(self.tokens)
        while state > 0 and steps < _MAX_LINKS:
            self._end[state] = end
            state = self._link[state]
            steps += 1


_HALVED = 4  # proposals of at least this length may be halved
_BORDER = -2  # between two outputs in the corpus; no token is negative, so nothing matches across it
_CONTEXT = 64  # tokens at the end of a sequence that are looked up again in a rebuilt corpus


class OutputCorpus:
    """Earlier outputs, at most ``size`` tokens; when full, the older half is dropped.

    ``generation`` changes whenever the automaton is rebuilt, which invalidates states of the old one.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigurationError(f"max_cached_tokens: expected at least 1, got {size}; give None for no corpus")
        self._size, self.generation = size, 0
        self.automaton = SuffixAutomaton()

    def add(self, tokens: Sequence[int]) -> None:
        for token in (*tokens, _BORDER):
            self.automaton.append(token)
        if len(self.automaton.tokens) > self._size:
            newest = self.automaton.tokens[len(self.automaton.tokens) - self._size // 2 :]
            self.automaton, self.generation = SuffixAutomaton(), self.generation + 1
            for token in newest:
                self.automaton.append(token)


@dataclass(slots=True)
class SuffixText:
    """One sequence, its repetition, and its longest suffix in the corpus.

    prompt_length  tokens of the prompt, which never become part of the corpus
    generation     of the corpus that ``state`` and ``length`` belong to
    state, length  of the corpus automaton: the longest suffix of the sequence that the corpus contains
    """

    prompt_length: int
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    copies: CopyTracker = field(default_factory=CopyTracker)
    generation: int = -1
    state: int = 0
    length: int = 0


class SuffixDrafter(TextDrafter[SuffixText]):
    """Drafts chains of up to ``k`` tokens after repetitions of at least ``min_match`` tokens.

    max_spec_factor    maximum drafted tokens for each token that is repeated: a short repetition predicts little, and a
                       short proposal is verified in a smaller graph. SuffixDecoding has the same maximum, of 1 to 4
    max_cached_tokens  None = repetitions in the sequence only; a number = also in that many tokens of earlier outputs
                       of this drafter, which all its requests share. The sequence wins unless the corpus has a longer
                       repetition
    corpus             a file of token ids (`paceline.decoder.token_files`), best of outputs of the target: repetitions
                       in it are also used. It takes about 600 bytes of memory per token. Without ``max_cached_tokens``

    A token that differs does not end a repetition, and is replaced again where it occurs again (`CopyTracker`).
    """

    def __init__(
        self,
        k: int,
        *,
        min_match: int = 2,
        max_spec_factor: float = 2.0,
        max_cached_tokens: int | None = None,
        corpus: str | Path | None = None,
    ) -> None:
        super().__init__(k)
        if min_match < 1:
            raise ConfigurationError(f"min_match: expected at least 1, got {min_match}; raise it")
        if not min_match * max_spec_factor >= 1:
            raise ConfigurationError(
                f"max_spec_factor: expected at least 1 draft token after a match of {min_match} tokens, got "
                f"{max_spec_factor}; raise it"
            )
        self._min_match, self._max_spec_factor = min_match, max_spec_factor
        if corpus is not None and max_cached_tokens is not None:
            raise ConfigurationError(
                "max_cached_tokens: expected either a corpus or max_cached_tokens, got both; leave one of them out"
            )
        self._corpus = None if max_cached_tokens is None else OutputCorpus(max_cached_tokens)
        self._grows = corpus is None
        if corpus is not None:
            tokens = _read(Path(corpus))
            self._corpus = OutputCorpus(len(tokens) + 1)  # and the border after it
            self._corpus.add(tokens)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        k = self.draft_shape.num_draft_tokens
        return (k // 2, k) if k >= _HALVED else (k,)

    def new_text(self, prompt: Sequence[int]) -> SuffixText:
        text = SuffixText(len(prompt))
        self.extend(text, prompt)
        return text

    def extend(self, text: SuffixText, tokens: Sequence[int]) -> None:
        for token in tokens:
            text.automaton.append(token)
        text.copies.follow(tokens)
        self._follow_corpus(text, tokens)
        length, start = text.automaton.repeated()
        source = text.automaton.tokens
        if self._corpus is not None and text.length > length:
            length, start = text.length, self._corpus.automaton.end_of(text.state)
            source = self._corpus.automaton.tokens
        if length > text.copies.run:
            text.copies.begin(source, start, length)

    def finish(self, text: SuffixText) -> None:
        if self._corpus is not None and self._grows:
            self._corpus.add(text.automaton.tokens[text.prompt_length :])

    def propose_text(self, text: SuffixText, limit: int) -> list[int]:
        repeated = text.copies.run
        if repeated < self._min_match:
            return []
        tokens = text.copies.ahead(int(min(limit, self._max_spec_factor * repeated)))
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens

    def _follow_corpus(self, text: SuffixText, tokens: Sequence[int]) -> None:
        if self._corpus is None:
            return
        if text.generation != self._corpus.generation:
            text.generation, text.state, text.length = self._corpus.generation, 0, 0
            tokens = text.automaton.tokens[-_CONTEXT:]
        for token in tokens:
            text.state, text.length = self._corpus.automaton.follow(text.state, text.length, token)


def _read(path: Path) -> list[int]:
    if not path.is_file():
        raise ConfigurationError(
            f"corpus: expected a file of token ids, got {path}, which does not exist; correct the path"
        )
    from paceline.decoder.token_files import read_tokens

    tokens: list[int] = read_tokens(path).tolist()
    if not tokens:
        raise ConfigurationError(
            f"corpus: expected at least one token, got an empty file {path}; give another file, or no corpus"
        )
    return tokens
