"""A tokenizer over pieces of bytes; no tests."""

from __future__ import annotations

from collections.abc import Sequence


class Pieces:
    """A tokenizer whose ids stand for pieces of bytes; what is not valid UTF-8 decodes to replacement marks."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return b"".join(self._pieces[int(i)] for i in token_ids).decode("utf-8", "replace")
