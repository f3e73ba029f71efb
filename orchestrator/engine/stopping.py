"""When a text ends: every token is looked at, in order, so that the earliest reason wins.

Text (stop strings) is handled here and nowhere deeper. Hugging Face's `StoppingCriteria` are called once for every
committed token with the growing prefix, as plain decoding would call them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Protocol

import torch

from paceline.core.detokenizer import REPLACEMENT, Decodes, IncrementalDetokenizer, plain_text
from paceline.core.errors import SamplingError
from paceline.outputs import FinishReason

Criterion = Callable[..., object]
"""Hugging Face's interface: (ids [1, length] int64, scores or None) -> bool or bool tensor [1]."""


@dataclass(frozen=True, slots=True)
class InNewText:
    """Stop strings that are looked for in new text alone, as OpenAI's are, and in the text that is shown: without
    special tokens. One that is a special token's own text ends the text too.

    Given as plain strings they are looked for as by Hugging Face's `StopStringCriteria`: they may begin in the prompt,
    and special tokens stand in the text.
    """

    strings: tuple[str, ...]


StopStrings = str | Sequence[str] | InNewText | None


@dataclass(frozen=True, slots=True)
class Stopping:
    """Limits of one request.

    length        of the whole text, prompt included; always set
    eos           ids that end the text and stay in it
    strings       texts that end it; the token that completes one stays in it
    in_new_text   ``strings`` are looked for as `InNewText` says
    tokenizer     turns ids into text, needed for ``strings``
    criteria      Hugging Face's

    Raises:
        SamplingError: a string is empty, or cannot be written as UTF-8. Nothing is left that could fail in a round,
            where requests of others would fail with it.
    """

    length: int
    eos: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    tokenizer: Decodes | None = None
    criteria: tuple[Criterion, ...] = ()
    in_new_text: bool = False

    def __post_init__(self) -> None:
        if not all(self.strings):
            raise SamplingError("a stop string is empty; it would stop every text at once")
        for string in self.strings:
            try:
                string.encode()
            except UnicodeEncodeError as error:
                raise SamplingError(f"the stop string {string!r} holds half a surrogate pair; no text does") from error


class StopChecker:
    """Follows one text."""

    def __init__(self, stopping: Stopping, prompt: Sequence[int]) -> None:
        self._stopping = stopping
        self.text = list(prompt)
        self._strings: _Strings | None = None
        if stopping.strings and stopping.tokenizer is not None:
            kind = _InNewText if stopping.in_new_text else _Anywhere
            self._strings = kind(stopping.strings, stopping.tokenizer, prompt)
        self.watchful = bool(stopping.strings or stopping.criteria)  # every token has to be looked at by itself
        self._foretold: deque[FinishReason | None] = deque()  # of the tokens of `ends` that are still to be appended

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self._stopping.length - len(self.text)

    def extend(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Add tokens up to the one that ends the text. -> how many were added, and the reason if the text ends."""
        one_by_one = self.watchful or bool(self._foretold) or len(tokens) >= self.left
        if not one_by_one and self._stopping.eos.isdisjoint(tokens):
            self.text += tokens
            return len(tokens), None
        for added, token in enumerate(tokens, start=1):
            reason = self.append(token)
            if reason is not None:
                return added, reason
        return len(tokens), None

    def append(self, token: int) -> FinishReason | None:
        """Add a token; the reason if the text ends with it."""
        self.text.append(token)
        return self._foretold.popleft() if self._foretold else self._reason(self.text)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the text, going on with these, ends with the last of them.

        For who decides a round token by token: it is told one token more each time, and all of them are then appended.
        So criteria, which may count, are asked once for every token here too.
        """
        assert len(tokens) == len(self._foretold) + 1, "one token more each time"
        reason = self._reason([*self.text, *tokens])
        self._foretold.append(reason)
        return reason is not None

    def _reason(self, text: list[int]) -> FinishReason | None:
        """Why a text ends with its last token, if it does."""
        stopping = self._stopping
        if text[-1] in stopping.eos or (self._strings is not None and self._strings.end(text)):
            return "stop"
        reason = self._criterion(text) if stopping.criteria else None
        return "length" if reason is None and len(text) >= stopping.length else reason

    def _criterion(self, text: list[int]) -> FinishReason | None:
        ids = torch.tensor([text])
        for criterion in self._stopping.criteria:
            verdict = criterion(ids, None)
            if bool(verdict.all()) if isinstance(verdict, torch.Tensor) else bool(verdict):
                return _named(criterion)
        return None


class _Strings(Protocol):
    """Asked once for every token, in order."""

    def end(self, text: Sequence[int]) -> bool:
        """Whether a stop string is complete with the last of these ids."""


class _Anywhere:
    """As Hugging Face looks for them."""

    def __init__(self, strings: Sequence[str], tokenizer: Decodes, prompt: Sequence[int]) -> None:
        # Spaces stay where they are: a string is looked for in the text as it is.
        self._strings, self._decode = strings, partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        # A token is at least a byte of text, so so many of them hold any stop string.
        self._lookback = max(len(s.encode()) for s in strings) + 8

    def end(self, text: Sequence[int]) -> bool:
        tail = list(text[-self._lookback :])
        now = self._decode(tail)
        old = _shared(self._decode(tail[:-1]), now)
        return any(now.find(s, max(0, old - len(s) + 1)) >= 0 for s in self._strings)


class _InNewText:
    """In the pieces that whoever shows the text gets too."""

    def __init__(self, strings: Sequence[str], tokenizer: Decodes, prompt: Sequence[int]) -> None:
        self._strings, self._tokenizer = strings, tokenizer
        self._growing, self._shown = IncrementalDetokenizer(tokenizer, prompt), ""
        self._longest = max(map(len, strings))

    def end(self, text: Sequence[int]) -> bool:
        self._shown += self._growing.push(text[-1])
        said = self._shown + self._growing.rest.rstrip(REPLACEMENT)
        self._shown = self._shown[-self._longest :]
        return any(s in said for s in self._strings) or self._special(text[-1]) in self._strings

    def _special(self, token: int) -> str:
        """The text of a token that is not shown."""
        if plain_text(self._tokenizer, [token]):
            return ""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)


def _shared(before: str, now: str) -> int:
    """How much of what was text still is. Its end may change: a replacement mark becomes a character, a space goes."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False)))


def _named(criterion: Criterion) -> FinishReason:
    """Hugging Face's own criteria for length and time are named as such."""
    from transformers.generation import stopping_criteria as hf  # slow to import, and seldom needed

    if isinstance(criterion, hf.MaxTimeCriteria):
        return "time"
    if isinstance(criterion, hf.MaxLengthCriteria):
        return "length"
    if isinstance(criterion, (hf.StopStringCriteria, hf.EosTokenCriteria)):
        return "stop"
    return "criteria"
