"""When a text ends: looked at after every single token, in order, so that the earliest reason wins.

Text (stop strings) is handled here and nowhere deeper. Hugging Face's `StoppingCriteria` are called once for every
committed token with the growing prefix, as plain decoding would call them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import torch

from paceline.core.errors import SamplingError
from paceline.result import FinishReason

Criterion = Callable[..., object]
"""Hugging Face's interface: (ids [1, length] int64, scores or None) -> bool or bool tensor [1]."""


@dataclass(frozen=True, slots=True)
class InNewText:
    """Stop strings that are looked for in new text alone, as OpenAI's are.

    Given as plain strings they may begin in the prompt, as with Hugging Face's `StopStringCriteria`.
    """

    strings: tuple[str, ...]


StopStrings = str | Sequence[str] | InNewText | None


class Decodes(Protocol):
    """The one thing asked of a tokenizer here."""

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Stopping:
    """Limits of one request.

    length        of the whole text, prompt included; always set
    eos           ids that end the text and stay in it
    strings       texts that end it; the token that completes one stays in it
    in_new_text   none of ``strings`` may begin in the prompt
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


class Watch:
    """Follows one text, token by token."""

    def __init__(self, stopping: Stopping, prompt: Sequence[int]) -> None:
        self._stopping, self._prompt = stopping, len(prompt)
        self.text = list(prompt)
        # Every token but a special one is at least a byte of text, so so many tokens hold any stop string.
        self._lookback = max((len(s.encode()) for s in stopping.strings), default=0) + 8
        self._foretold: deque[FinishReason | None] = deque()  # of the tokens of `ends` that are still to be appended

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self._stopping.length - len(self.text)

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
        if text[-1] in stopping.eos or (stopping.strings and self._ends_a_string(text)):
            return "stop"
        reason = self._criterion(text) if stopping.criteria else None
        return "length" if reason is None and len(text) >= stopping.length else reason

    def _ends_a_string(self, text: list[int]) -> bool:
        if not self._stopping.strings or self._stopping.tokenizer is None:
            return False
        # Spaces stay where they are: a string is looked for in the text that is shown.
        decode = partial(self._stopping.tokenizer.decode, clean_up_tokenization_spaces=False)
        begin = max(0, len(text) - self._lookback)
        tail = text[begin:]
        now = decode(tail)
        old, first = _shared(decode(tail[:-1]), now), 0
        if self._stopping.in_new_text and begin < self._prompt:
            first = _shared(decode(text[begin : self._prompt]), now)
        return any(now.find(s, max(first, old - len(s) + 1)) >= 0 for s in self._stopping.strings)

    def _criterion(self, text: list[int]) -> FinishReason | None:
        ids = torch.tensor([text])
        for criterion in self._stopping.criteria:
            verdict = criterion(ids, None)
            if bool(verdict.all()) if isinstance(verdict, torch.Tensor) else bool(verdict):
                return _named(criterion)
        return None


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
