"""From token ids to text, piece by piece, for text that is read or shown while it grows.

A token may end inside a character (byte-level vocabularies split UTF-8), and what a token means may depend on the one
before it (a leading space), so pieces are differences of two decodings. Not here: stop strings (`paceline.stopping`),
and loading tokenizers (`paceline.detokenise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

UNFINISHED = "\ufffd"
"""What an incomplete character decodes to."""

_CONTEXT = 8  # tokens of the prompt that the first piece is decoded behind


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str, **options: Any) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


class Detokeniser:
    """Text of a growing list of tokens, without special tokens. What is handed out is never taken back."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        self._from, self._done = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token; the text that is certain now, which may be empty."""
        self._tokens.append(token)
        text, known = self._texts()
        if text.endswith(UNFINISHED) or len(text) < len(known):
            return ""
        piece = text[len(known) :]
        if piece:  # behind a special token alone, the next one would look like the beginning of a text
            self._from = self._done
        self._done = len(self._tokens)
        return piece

    @property
    def held(self) -> int:
        """How many tokens at the end have not become text, since a character is unfinished."""
        return len(self._tokens) - self._done

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, known = self._texts()
        self._from = self._done = len(self._tokens)
        return text[len(known) :]

    def _texts(self) -> tuple[str, str]:
        """The text of the last finished piece with what came since, and without."""
        return self._decode(self._tokens[self._from :]), self._decode(self._tokens[self._from : self._done])

    def _decode(self, tokens: list[int]) -> str:
        return plain_text(self._tokenizer, tokens)


def plain_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """The text of ids as it is, without special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
