"""Text in which some special tokens stay: those that mark reasoning and calls of tools in an answer.

Hugging Face's tokenizers leave out all special tokens of a text or none. Mistral's [TOOL_CALLS] and [THINK] are special
tokens, which parsers of answers look for, and so is the end of the text, which nobody is to see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.core.detokenizer import Decodes


class MarkerTokens:
    """Decodes as its tokenizer does, except that it shows some special tokens where it leaves out the others."""

    def __init__(self, tokenizer: Decodes, hidden: frozenset[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden

    def decode(self, token_ids: list[int], **options: Any) -> str:
        """See `Decodes`."""
        if options.pop("skip_special_tokens", False):
            token_ids = [token for token in token_ids if token not in self._hidden]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, **options)


def with_markers(tokenizer: Decodes, markers: Iterable[str]) -> Decodes:
    """A decoder that shows these markers; the tokenizer itself where none is a special token of it."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: str(one.content) for number, one in added.items() if one.special}
    wanted = set(markers)
    shown = {number for number, text in special.items() if text in wanted}
    if not shown:
        return tokenizer
    return MarkerTokens(tokenizer, frozenset(special.keys() | set(getattr(tokenizer, "all_special_ids", ()))) - shown)
