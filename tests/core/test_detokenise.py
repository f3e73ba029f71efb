"""Text made piece by piece is the text made at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.detokenizer import REPLACEMENT, IncrementalDetokenizer, plain_text
from tests.draft.tokenizers_of_two import TEXT, byte_fallback, bytes_merged, every_byte, marked_words


@pytest.mark.parametrize("make", [marked_words, lambda: bytes_merged(90)], ids=["marked words", "bytes"])
@pytest.mark.parametrize("run", [1, 3])
def test_special_tokens_inside_a_text_cost_no_space(make: Callable[[], Any], run: int) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    for place in range(len(ids) + 1):
        tokens = [*ids[:place], *[tokenizer.eos_token_id] * run, *ids[place:]]
        growing = IncrementalDetokenizer(tokenizer)
        pieces = [growing.push(token) for token in tokens]
        assert "".join(pieces) + growing.flush() == plain_text(tokenizer, tokens)


class Counting:
    """A tokenizer that writes down how many ids it had to decode at once, at most."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.most = tokenizer, 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.most = max(self.most, len(token_ids))
        return self.tokenizer.decode(token_ids, **options)  # type: ignore[no-any-return]


EVERY_BYTE, FALLBACK = every_byte(), byte_fallback()
PARTS = [i for i in range(len(EVERY_BYTE)) if REPLACEMENT in EVERY_BYTE.decode([i])]


def pushed(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The pieces, and what is left at the end."""
    growing = IncrementalDetokenizer(tokenizer)
    pieces = [growing.push(token) for token in tokens]
    rest = growing.rest
    assert growing.flush() == rest and not growing.held
    return [*pieces, rest]


@settings(max_examples=300)
@given(tokens=st.lists(st.sampled_from(PARTS) | st.integers(0, len(EVERY_BYTE) - 1), max_size=40))
def test_any_bytes_add_up_to_the_text_decoded_at_once(tokens: list[int]) -> None:
    assert "".join(pushed(EVERY_BYTE, tokens)) == plain_text(EVERY_BYTE, tokens)


@pytest.mark.parametrize("tokenizer", [EVERY_BYTE, FALLBACK], ids=["byte-level", "byte fallback"])
def test_bytes_that_become_no_character_are_not_held_to_the_end(tokenizer: Any) -> None:
    """Nor are ever more tokens decoded for one."""
    wrong = next(i for i in range(1, 257) if tokenizer.decode([i]) == REPLACEMENT)
    letter = tokenizer.encode("a", add_special_tokens=False)
    counted, tokens = Counting(tokenizer), [*letter, *[wrong] * 50, *letter]
    pieces = pushed(counted, tokens)
    assert "".join(pieces) == plain_text(tokenizer, tokens)
    for size in range(len(tokens)):
        assert len("".join(pieces[: size + 1])) >= size + 1 - 3
    assert counted.most < 24


@settings(max_examples=200)
@given(text=st.text("a\u00e9\u65e5\U0001f642", max_size=12), special=st.integers(0, 40))
def test_characters_that_are_spelled_in_bytes_come_out_one_by_one(text: str, special: int) -> None:
    tokens = [byte + 1 for byte in text.encode()]
    tokens[special:special] = [0] * 5 if special < len(tokens) else []
    pieces = pushed(FALLBACK, tokens)
    assert "".join(pieces) == text and all(len(piece) <= 1 for piece in pieces) and pieces[-1] == ""


def test_a_wrong_byte_takes_back_no_character_of_its_run() -> None:
    """Decoded at once, such a run is marks altogether."""
    day = [byte + 1 for byte in "\u65e5".encode()]
    assert "".join(pushed(FALLBACK, [*day, 0x80 + 1, 257])) == "\u65e5\ufffda"
    assert "".join(pushed(FALLBACK, [*day, day[0]])) == "\u65e5\ufffd"
    assert "".join(pushed(FALLBACK, [*day, *day[:2], 257, *day])) == "\u65e5\ufffd\ufffda\u65e5"


def test_a_character_that_began_in_the_prompt_is_new_text() -> None:
    begun = EVERY_BYTE.encode("x\u00ff")
    growing = IncrementalDetokenizer(EVERY_BYTE, begun[:-1])
    assert plain_text(EVERY_BYTE, begun[:-1]) == "x\ufffd" and growing.push(begun[-1]) == "\u00ff"
    growing = IncrementalDetokenizer(EVERY_BYTE, begun[:-1])
    assert growing.push(begun[0]) == "x"  # its mark is the prompt's
