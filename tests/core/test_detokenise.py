"""Text made piece by piece is the text made at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.detokenise import Detokeniser, plain_text
from tests.draft.tokenizers_of_two import TEXT, bytes_merged, marked_words


@pytest.mark.parametrize("make", [marked_words, lambda: bytes_merged(90)], ids=["marked words", "bytes"])
@pytest.mark.parametrize("run", [1, 3])
def test_special_tokens_inside_a_text_cost_no_space(make: Callable[[], Any], run: int) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    for place in range(len(ids) + 1):
        tokens = [*ids[:place], *[tokenizer.eos_token_id] * run, *ids[place:]]
        growing = Detokeniser(tokenizer)
        pieces = [growing.push(token) for token in tokens]
        assert "".join(pieces) + growing.flush() == plain_text(tokenizer, tokens)
