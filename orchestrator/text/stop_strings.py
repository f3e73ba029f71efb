"""Stop strings: find where a growing text stops, and how much of it can be shown before.

The engine uses it to detect the end of a sequence, a server to release text. End-of-sequence ids and lengths are in
`paceline.engine.batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from paceline.core.detokenizer import REPLACEMENT, Decodes, IncrementalDetokenizer, plain_text
from paceline.core.errors import SamplingError

_EXTRA_TOKENS = 8  # of context before the part of the prompt in which a stop string may begin


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Strings that stop a generation. The token that completes one stays in the output.

    strings  in any order; the first complete one counts
    scope    "text": as Hugging Face's `StopStringCriteria`; a string may begin in the prompt, and special tokens are
             part of the text. "output": as OpenAI's API; only new text counts, without special tokens, except that a
             string equal to a special token's text also stops the generation

    Raises:
        SamplingError: a string is empty or cannot be written as UTF-8, or the scope is unknown.
    """

    strings: tuple[str, ...]
    scope: Literal["text", "output"] = "text"

    def __post_init__(self) -> None:
        if self.scope not in ("text", "output"):
            raise SamplingError(
                f"scope: expected 'text' or 'output' for stop strings, got {self.scope!r}; use one of them"
            )
        if not all(self.strings):
            raise SamplingError(
                "stop_strings: expected strings that are not empty, got an empty one, which would stop every "
                "request at once; remove it"
            )
        for string in self.strings:
            try:
                string.encode()
            except UnicodeEncodeError as error:
                raise SamplingError(
                    f"stop_strings: expected valid Unicode, got {string!r} with half a surrogate pair; remove it"
                ) from error

    @classmethod
    def of(cls, strings: str | Sequence[str] | StopStrings | None) -> StopStrings | None:
        """Convert the user's value; None if nothing stops."""
        if isinstance(strings, StopStrings):
            return strings if strings.strings else None
        listed = (strings,) if isinstance(strings, str) else tuple(strings or ())  # "" is one, and rejected
        return cls(listed) if listed else None


class StopStringFilter:
    """Turns tokens into text until a stop string is complete; that string and the text after it are not returned.

    Text that may begin a stop string is held back. ``finished``: a stop string is complete; this may be one token
    before `push` can return the text, since an incomplete character can follow the string. Without stop strings this is
    incremental detokenization.
    """

    def __init__(self, stop: StopStrings | None, tokenizer: Decodes, prompt: Sequence[int] = ()) -> None:
        self._strings = () if stop is None else stop.strings
        self._in_output = stop is None or stop.scope == "output"
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=self._in_output)
        self._held = "" if self._in_output else self._end_of(prompt)
        self._searched = self._held  # the text searched for a stop string so far
        self.finished = False

    def push(self, token: int) -> str:
        """Add a token; the text that is certain to be shown now, which may be empty."""
        if self.finished:
            return ""
        self._held += self._text.push(token)
        if not self._strings:
            return self._hand_out(len(self._held))
        text = self._held + (self._text.rest.rstrip(REPLACEMENT) if self._text.held else "")
        end = self._first_stop(text)
        if end is not None:
            self.finished = True
            return text[:end]
        if self._in_output and self._special_text(token) in self._strings:
            self.finished = True
            return self._held
        self._searched = text
        return self._hand_out(len(self._held) - max(_overlap(self._held, string) for string in self._strings))

    def flush(self) -> str:
        """The text that was held back, at the end of the output."""
        if self.finished:
            return ""
        self._held += self._text.flush()
        end = self._first_stop(self._held) if self._strings else None
        self.finished = end is not None
        return self._hand_out(len(self._held) if end is None else end)

    def _first_stop(self, text: str) -> int | None:
        """Return where the first complete stop string begins; text that was searched before holds none."""
        old = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._searched, text, strict=False)))
        places = [text.find(string, max(0, old - len(string) + 1)) for string in self._strings]
        return min((place for place in places if place >= 0), default=None)

    def _hand_out(self, count: int) -> str:
        piece, self._held, self._searched = self._held[:count], self._held[count:], self._searched[count:]
        return piece

    def _end_of(self, prompt: Sequence[int]) -> str:
        """The end of the prompt's text in which a stop string may begin."""
        longest = max(len(string.encode()) for string in self._strings)
        # A token is at least a byte of text, so this many tokens hold the beginning of any stop string.
        tail = list(prompt[-(longest + _EXTRA_TOKENS) :])
        return self._tokenizer.decode(tail, clean_up_tokenization_spaces=False)[-longest:]

    def _special_text(self, token: int) -> str:
        """The text of a token that is not shown, or an empty text if it is shown."""
        if plain_text(self._tokenizer, [token]):
            return ""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of the text are a beginning of the stop string."""
    longest = min(len(string) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
