"""Propose what followed the longest repetition of the text's end, in the text itself or in earlier outputs, with the
changes that were made in it so far.

Prompt lookup without a largest n-gram. The idea of drafting from suffix structures over past outputs is that of SAM
decoding (Hu et al., arXiv 2411.10666) and SuffixDecoding (Oliaro et al., arXiv 2411.04975); that of a file of texts to
draft from, REST (He et al., arXiv 2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import ConfigurationError
from paceline.draft.base import TextDrafter
from paceline.draft.copy_tracker import CopyTracker
from paceline.draft.suffix_index import SuffixAutomaton

_HALVED = 4  # proposals of at least so many tokens may be halved
_BORDER = -2  # between two outputs in the corpus; no token is negative, so nothing matches across it
_CONTEXT = 64  # tokens at the end of a text that are looked up again in a corpus that was rebuilt


class OutputCorpus:
    """Earlier outputs, at most ``size`` tokens; when they are too many, the older half is dropped.

    ``generation`` changes whenever the automaton was rebuilt, so that states of the old one have no meaning any more.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigurationError(f"max_cached_tokens={size} keeps nothing; give 1 or more, or None for no corpus")
        self._size, self.generation = size, 0
        self.automaton = SuffixAutomaton()

    def add(self, tokens: Sequence[int]) -> None:
        """Add the output of a finished request."""
        for token in (*tokens, _BORDER):
            self.automaton.append(token)
        if len(self.automaton.tokens) > self._size:
            newest = self.automaton.tokens[len(self.automaton.tokens) - self._size // 2 :]
            self.automaton, self.generation = SuffixAutomaton(), self.generation + 1
            for token in newest:
                self.automaton.append(token)


@dataclass(slots=True)
class SuffixText:
    """One text, what it repeats, and how much of its end is in the corpus.

    prompt_length  tokens of the prompt, which never become part of the corpus
    generation     of the corpus that ``state`` and ``length`` belong to
    state, length  of the corpus automaton: the longest end of the text that the corpus contains
    """

    prompt_length: int
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    copies: CopyTracker = field(default_factory=CopyTracker)
    generation: int = -1
    state: int = 0
    length: int = 0


class SuffixDrafter(TextDrafter[SuffixText]):
    """Drafts chains of up to ``k`` tokens after repetitions of at least ``min_match`` tokens.

    max_spec_factor    no more than so many tokens are drafted for each token that is repeated: a short repetition tells
                       little, and the little that it proposes is verified in a smaller graph. SuffixDecoding has such
                       a maximum too, of 1 to 4
    max_cached_tokens  None = repetitions of the text alone; a number = also of that many tokens of earlier outputs of
                       this drafter, which all its requests share. The text itself wins unless the corpus has a longer
                       repetition
    corpus             a file of token ids (`paceline.decoder.token_files`), best of texts that the target wrote: also
                       repetitions of these. It is read when the drafter is made, and takes about 600 bytes of memory a
                       token

    A token that differs does not end a repetition, and is changed again where it comes again (`CopyTracker`).

    Raises:
        ConfigurationError: a number is out of range, the file cannot be used, or ``corpus`` and ``max_cached_tokens``
            are both given.
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
            raise ConfigurationError(f"min_match={min_match} tokens repeat nothing; give 1 or more")
        if not min_match * max_spec_factor >= 1:
            raise ConfigurationError(
                f"max_spec_factor={max_spec_factor} leaves a repetition of {min_match} tokens without a draft; give a "
                "larger one"
            )
        self._min_match, self._max_spec_factor = min_match, max_spec_factor
        if corpus is not None and max_cached_tokens is not None:
            raise ConfigurationError("a suffix drafter has a corpus or max_cached_tokens; leave one of them out")
        self._corpus = None if max_cached_tokens is None else OutputCorpus(max_cached_tokens)
        self._grows = corpus is None
        if corpus is not None:
            tokens = _read(Path(corpus))
            self._corpus = OutputCorpus(len(tokens) + 1)  # and the border behind it
            self._corpus.add(tokens)

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """See `paceline.core.protocols.Varies`."""
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
        """Keep the longest end of the text that the corpus contains."""
        if self._corpus is None:
            return
        if text.generation != self._corpus.generation:
            text.generation, text.state, text.length = self._corpus.generation, 0, 0
            tokens = text.automaton.tokens[-_CONTEXT:]
        for token in tokens:
            text.state, text.length = self._corpus.automaton.follow(text.state, text.length, token)


def _read(path: Path) -> list[int]:
    if not path.is_file():
        raise ConfigurationError(f"the corpus {path} does not exist; give a file of token ids")
    from paceline.decoder.token_files import read_tokens

    tokens: list[int] = read_tokens(path).tolist()
    if not tokens:
        raise ConfigurationError(f"the corpus {path} holds no tokens; give one that does, or none")
    return tokens
