"""A row of the window graph has the same logits, bit for bit, whatever its place and whatever the other rows hold.

This is what lets a round with drafts decide a token exactly as a round without them would.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.auto import SamplingDecoder
from paceline.decoder import steps
from tests.decoder.tiny import VOCABULARY, Workshop

WIDTH = 5
LENGTH = 60
FORMATS = [(backend, amp) for backend in ("eager", "native") for amp in ("f32", "bf16", "f16")]


@pytest.fixture(params=FORMATS, ids=lambda x: " ".join(x))
def decoder(request: pytest.FixtureRequest, workshop: Workshop) -> SamplingDecoder:
    backend, amp = request.param
    return workshop.decoder(backend=backend, amp=amp)


def ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def window(decoder: SamplingDecoder, tokens: Tensor, row: Tensor | int) -> Tensor:
    """Logits of a copy: the graph may give back the same memory at the next call."""
    start = row if isinstance(row, Tensor) else torch.full((len(tokens),), row, dtype=torch.int32)
    return steps.window(decoder, tokens.contiguous(), start, bucket=decoder.n_positions)[0].clone()


def read(decoder: SamplingDecoder, text: Tensor) -> Tensor:
    """Logits of a text read in windows from its first row on. text [B, LENGTH] -> [B, LENGTH, V]."""
    parts = [window(decoder, text[:, at : at + WIDTH], at) for at in range(0, LENGTH, WIDTH)]
    return torch.cat(parts, 1)


def test_a_rows_bits_do_not_depend_on_its_place_in_the_window(decoder: SamplingDecoder) -> None:
    text = ids(0, 4, LENGTH)
    expected = read(decoder, text)
    for shift in range(1, WIDTH):
        for at in range(shift, LENGTH - WIDTH, WIDTH):
            assert torch.equal(window(decoder, text[:, at : at + WIDTH], at), expected[:, at : at + WIDTH])


def test_a_rows_bits_do_not_depend_on_later_rows(decoder: SamplingDecoder) -> None:
    text = ids(0, 4, LENGTH)
    expected = read(decoder, text)
    for at in (0, 20, 50):
        for kept in range(1, WIDTH):
            tokens = text[:, at : at + WIDTH].clone()
            tokens[:, kept:] = ids(at + kept, 4, WIDTH - kept)
            assert torch.equal(window(decoder, tokens, at)[:, :kept], expected[:, at : at + kept])
        window(decoder, text[:, at : at + WIDTH], at)


def test_a_rows_bits_do_not_depend_on_other_slots(decoder: SamplingDecoder) -> None:
    text = ids(0, 4, LENGTH)
    expected = read(decoder, text)
    read(decoder, ids(9, 4, LENGTH))
    for slot in range(4):
        for at in range(0, LENGTH, WIDTH):
            tokens, row = ids(at, 4, WIDTH), torch.tensor([0, 90, 33, 7], dtype=torch.int32)
            tokens[slot], row[slot] = text[slot, at : at + WIDTH], at
            assert torch.equal(window(decoder, tokens, row)[slot], expected[slot, at : at + WIDTH])


def test_a_rejected_draft_leaves_no_trace(decoder: SamplingDecoder) -> None:
    """Rows are rolled back by not advancing: junk stands in the cache until it is written over."""
    text = ids(0, 4, LENGTH)
    expected = read(decoder, text)
    for at in range(LENGTH - WIDTH):
        tokens = ids(1000 + at, 4, WIDTH)
        tokens[:, 0] = text[:, at]
        assert torch.equal(window(decoder, tokens, at)[:, 0], expected[:, at])


@pytest.mark.parametrize("amp", ["f32", "bf16"])
def test_on_native_kernels_all_widths_give_the_same_bits(workshop: Workshop, amp: str) -> None:
    decoder = workshop.decoder(backend="native", amp=amp)
    text = ids(0, 4, LENGTH)
    expected = read(decoder, text)
    single = [window(decoder, text[:, at : at + 1], at) for at in range(LENGTH)]
    assert torch.equal(torch.cat(single, 1), expected)
    for slot in range(4):
        logits = steps.prefill(decoder, slot, text[slot].tolist())[0]
        assert torch.equal(logits[0, 0], expected[slot, -1])
