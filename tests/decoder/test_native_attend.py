"""Native attention over cache rows: right, exact in what it writes, and independent of everything but its own row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.protocol import PLAIN_ATTENTION, AttentionRule, CachePosition
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native.ops import Native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [8, 12, 16, 48, 64, 80]
HEADS = {"every head": (4, 4), "grouped": (8, 2), "one": (6, 1), "three to one": (6, 2)}
ROWS = 70  # of the cache


@dataclass
class Case:
    """Inputs of one call; ``row``, ``count`` and ``slots`` are ragged."""

    qkv: tuple[Tensor, Tensor, Tensor]
    cache: tuple[Tensor, Tensor]
    row: list[int]
    count: list[int]
    slots: list[int]

    @property
    def place(self) -> CachePosition:
        row, count, slots = (torch.tensor(x, dtype=torch.int32) for x in (self.row, self.count, self.slots))
        return CachePosition(row, count, slots, ROWS)

    def copied(self) -> Case:
        return replace(self, cache=(self.cache[0].clone(), self.cache[1].clone()))


def case(
    heads: tuple[int, int] = (8, 2),
    width: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    window: int = 5,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    many, few = heads

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    qkv = (made(3, window, many, width), made(3, window, few, width), made(3, window, few, width))
    cache = (made(4, few, ROWS, width).to(dtype), made(4, few, ROWS, width).to(dtype))
    return Case(qkv, cache, [0, 37, 65 - window], [window, window, window], [2, 0, 3])


def attend(kernels: Native | TorchKernels, given: Case) -> Tensor:
    return kernels.attend(given.qkv, given.cache, given.place)


def textbook(given: Case, rule: AttentionRule = PLAIN_ATTENTION, *, both_ways: bool = False) -> Tensor:
    """Line by line and head by head, in float64; rows after the count are zero."""
    q, k, v = given.qkv
    heads, width = q.shape[2:]
    out = torch.zeros(*q.shape, dtype=torch.float64)
    for b, (row, slot) in enumerate(zip(given.row, given.slots, strict=True)):
        keys, values = (
            torch.cat((cache[slot, :, :row], new[b].transpose(0, 1).to(cache.dtype)), 1).double()
            for cache, new in zip(given.cache, (k, v), strict=True)
        )
        for t in range(given.count[b]):
            begin = max(0, row + t + 1 - rule.window) if rule.window else 0
            begin = (row + t) // rule.chunk * rule.chunk if rule.chunk else begin
            end = row + (given.count[b] if both_ways else t + 1)
            for h in range(heads):
                g = h * k.shape[2] // heads
                scores = keys[g, begin:end] @ q[b, t, h].double() / width**0.5
                if rule.cap:
                    scores = rule.cap * torch.tanh(scores / rule.cap)
                if rule.slopes is not None:
                    scores = scores + rule.slopes[h].double() * torch.arange(begin + 1 - end, 1)
                if rule.sinks is not None:
                    scores = torch.cat((scores, rule.sinks[h : h + 1].double()))
                out[b, t, h] = scores.softmax(0)[: end - begin] @ values[g, begin:end]
    return out.flatten(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", HEADS)
def test_native_attention_equals_the_textbook_formula(
    native: Native, heads: str, width: int, dtype: torch.dtype
) -> None:
    for window in (1, 2, 5, 9):
        given = case(HEADS[heads], width, dtype=dtype, window=window, seed=window)
        made = attend(native, given.copied())
        torch.testing.assert_close(made.double(), textbook(given), rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(made, attend(TorchKernels(), given.copied()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 12, 48])
def test_exactly_the_windows_cache_rows_are_written(native: Native, width: int, dtype: torch.dtype) -> None:
    given = case(width=width, dtype=dtype)
    given.count = [5, 3, 1]
    before, used = given.copied(), given.copied()
    attend(native, used)
    for side in (0, 1):
        expected = before.cache[side]
        for b, (row, count, slot) in enumerate(zip(given.row, given.count, given.slots, strict=True)):
            for t in range(count):
                expected[slot, :, row + t] = given.qkv[1 + side][b, t].to(dtype)
        assert torch.equal(used.cache[side], expected)


def test_rounding_to_16_bits_equals_pytorch(native: Native) -> None:
    edges = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.3e38, 1e-40, 65504.0, 65519.0, -1.0, 1e-8, 70000.0, 0.1])
    for dtype in DTYPES[1:]:
        given = case((1, 1), 12, dtype=dtype, window=1)
        for part in given.qkv[1:]:
            part.copy_(edges)
        attend(native, given)
        for b, (row, slot) in enumerate(zip(given.row, given.slots, strict=True)):
            for side in (0, 1):
                written = given.cache[side][slot, 0, row].view(torch.int16)
                assert torch.equal(written, given.qkv[1 + side][b, 0, 0].to(dtype).view(torch.int16))


def test_rows_after_the_count_are_zero_and_have_no_effect(native: Native) -> None:
    given = case()
    given.count = [5, 2, 0]
    made = attend(native, given.copied())
    torch.testing.assert_close(made.double(), textbook(given), rtol=1e-5, atol=3e-6)
    assert not made[1, 2:].any()
    assert not made[2].any()
    other = given.copied()
    for part in other.qkv:
        part[1, 2:], part[2] = float("nan"), float("nan")
    assert torch.equal(attend(native, other), made)
    assert not any(c.isnan().any() for c in other.cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [12, 48])
def test_a_row_has_the_same_bits_in_every_window(native: Native, heads: str, dtype: torch.dtype, width: int) -> None:
    """A text of nine tokens: all at once, one by one, and in every split; a row's result never changes."""
    given = case(HEADS[heads], width, dtype=dtype, window=9)
    whole = attend(native, given.copied())
    for sizes in ([1] * 9, [2] * 4 + [1], [4, 5], [5, 4], [8, 1], [1, 8], [3, 3, 3], [7, 2]):
        parts, done, used = [], 0, given.copied()
        for size in sizes:
            qkv = tuple(x[:, done : done + size].contiguous() for x in given.qkv)
            part = replace(used, qkv=qkv, row=[r + done for r in given.row], count=[size] * 3)
            parts.append(attend(native, part))
            done += size
        assert torch.equal(torch.cat(parts, 1), whole)


def test_a_row_has_the_same_bits_with_other_batch_rows_and_in_any_slot(native: Native) -> None:
    given = case()
    whole = attend(native, given.copied())
    for b in range(3):
        qkv = tuple(x[b : b + 1] for x in given.qkv)
        alone = replace(given.copied(), qkv=qkv, row=given.row[b : b + 1], count=[5], slots=given.slots[b : b + 1])
        assert torch.equal(attend(native, alone), whole[b : b + 1])
        moved = replace(alone.copied(), slots=[1])
        for to, source in zip(moved.cache, given.cache, strict=True):
            to[1] = source[given.slots[b]]
        assert torch.equal(attend(native, moved), whole[b : b + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_rows_do_not_affect_attention(native: Native, dtype: torch.dtype) -> None:
    """Junk in the rest of the window and in the cache rows after it; finite, as activations are."""
    for kept in range(5):
        given = case(dtype=dtype)
        clean = attend(native, given.copied())
        dirty = given.copied()
        for part in dirty.qkv:
            part[:, kept + 1 :] = torch.randn(part[:, kept + 1 :].shape) * 100
        for b, slot in enumerate(given.slots):
            for side in dirty.cache:
                side[slot, :, given.row[b] + 5 :] = float("nan")
        for side in dirty.cache:
            side[1] = float("nan")  # a slot that is not asked for
        assert torch.equal(attend(native, dirty)[:, : kept + 1], clean[:, : kept + 1])


def test_attention_is_the_same_with_any_number_of_threads(native: Native, restored_threads: None) -> None:
    given = case((8, 4), 48, window=9)
    seen = []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        seen.append(attend(native, given.copied()))
    assert all(torch.equal(seen[0], other) for other in seen)


def test_extreme_and_equal_scores_are_right(native: Native) -> None:
    for scale in (0.0, 30.0, 1e4):
        given = case()
        given.qkv[0].mul_(scale)
        made = attend(native, given.copied())
        assert made.isfinite().all()
        torch.testing.assert_close(made.double(), textbook(given), rtol=1e-3, atol=1e-3)
