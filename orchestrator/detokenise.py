"""From token ids to text, piece by piece, for text that is shown while it grows.

A token may end inside a character (byte-level vocabularies split UTF-8), and what a token means may depend on the one
before it (a leading space), so pieces are differences of two decodings. Not here: stop strings (`paceline.stopping`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from paceline.core.errors import CheckpointError

_UNFINISHED = "\ufffd"  # what an incomplete character decodes to
_CONTEXT = 8  # tokens of the prompt that the first piece is decoded behind


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: Any) -> str: ...


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a checkpoint's folder; code in the folder is never run, nothing is fetched.

    Raises:
        CheckpointError: there is none that can be read.
    """
    try:
        made: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read ({error}); put the model's tokenizer.json into it"
        ) from error
    tokenizer: Tokenizer = made
    return tokenizer


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
        if text.endswith(_UNFINISHED) or len(text) < len(known):
            return ""
        self._from, self._done = self._done, len(self._tokens)
        return text[len(known) :]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, known = self._texts()
        self._from = self._done = len(self._tokens)
        return text[len(known) :]

    def _texts(self) -> tuple[str, str]:
        """The text of the last finished piece with what came since, and without."""
        return self._decode(self._tokens[self._from :]), self._decode(self._tokens[self._from : self._done])

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
