"""Attention over cache rows, by every rule and in every format: right, exact in what it writes, and independent of
everything but its own row. A node of a tree attends to its ancestors, with the bits that a chain of them would have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import tree
from paceline.core.types import PAD
from paceline.decoder.kernels import cache_rows
from paceline.decoder.kernels.protocol import PLAIN_ATTENTION, AttentionRule, CachePosition, Kernels, Tree
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native.ops import Native
from paceline.neuron.kernels import TraceableKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW = list(cache_rows.CACHE_DTYPES.values())
HEADS = {"every head": (4, 4), "grouped": (8, 2), "one": (6, 1), "three to one": (6, 2)}
ROWS = 70  # of the cache
TREE = (-1, -1, 0, 0, 1, 2, 5, 4)

SINKS = torch.tensor([3.0, -1.0, 0.0, 0.5, 9.0, -40.0])
SLOPES = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.05, 0.01])
RULES = {
    "plain": PLAIN_ATTENTION,
    "slides": AttentionRule(window=7),
    "slides within its window": AttentionRule(window=2),
    "capped": AttentionRule(cap=0.8),
    "falls": AttentionRule(slopes=SLOPES),
    "sinks": AttentionRule(sinks=SINKS),
    "in chunks": AttentionRule(chunk=5),
    "slides and sinks": AttentionRule(window=7, sinks=SINKS),
    "all": AttentionRule(window=21, cap=1.5, slopes=SLOPES),
}
every_kind = pytest.mark.parametrize(
    ("heads", "width", "dtype", "rule"),
    [
        *((heads, width, dtype, "plain") for heads in HEADS for width in (8, 12, 16, 48, 64, 80) for dtype in DTYPES),
        *(("grouped", width, dtype, "plain") for width in (12, 16) for dtype in NARROW),
        *(("three to one", width, dtype, rule) for rule in RULES for width in (12, 48) for dtype in DTYPES[:2]),
    ],
)


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

    def windows(self, begin: int, size: int) -> Case:
        """Some of the tokens, after those before them; over the same cache."""
        qkv = tuple(x[:, begin : begin + size].contiguous() for x in self.qkv)
        return replace(self, qkv=qkv, row=[row + begin for row in self.row], count=[qkv[0].shape[1]] * 3)


def case(
    heads: tuple[int, int] = (8, 2), width: int = 16, *, dtype: torch.dtype = torch.float32, window: int = 5
) -> Case:
    generator = torch.Generator().manual_seed(window)
    many, few = heads

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    qkv = (made(3, window, many, width), made(3, window, few, width), made(3, window, few, width))
    cache = (cache_rows.pack(made(4, few, ROWS, width), dtype), cache_rows.pack(made(4, few, ROWS, width), dtype))
    return Case(qkv, cache, [0, 37, 65 - window], [window, window, window], [2, 0, 3])


def attend(
    kernels: Kernels,
    given: Case,
    rule: AttentionRule = PLAIN_ATTENTION,
    *,
    parents: tuple[int, ...] | None = None,
    both_ways: bool = False,
) -> Tensor:
    """The result over a copy of the cache; ``parents``: of a tree."""
    own = given.copied()
    return kernels.attend(own.qkv, own.cache, place_of(own, parents, both_ways=both_ways), rule=rule)


def place_of(given: Case, parents: tuple[int, ...] | None, *, both_ways: bool = False) -> CachePosition:
    rows = None if parents is None else torch.tensor([tree.verify_rows(parents)] * 3, dtype=torch.int32)
    return replace(given.place, tree=None if rows is None else Tree.of(rows), both_ways=both_ways)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def textbook(given: Case, rule: AttentionRule = PLAIN_ATTENTION, *, both_ways: bool = False) -> Tensor:
    """Line by line and head by head, in float64; rows after the count are zero."""
    q, k, v = given.qkv
    heads, width = q.shape[2:]
    out = torch.zeros(*q.shape, dtype=torch.float64)
    for b, (row, slot) in enumerate(zip(given.row, given.slots, strict=True)):
        keys, values = (
            torch.cat([cache_rows.unpack(x) for x in (cache[slot, :, :row], cache_rows.pack(new[b], cache.dtype))], 1)
            for cache, new in zip(given.cache, (k.transpose(1, 2), v.transpose(1, 2)), strict=True)
        )
        for t in range(given.count[b]):
            begin = max(0, row + t + 1 - rule.window) if rule.window else 0
            begin = (row + t) // rule.chunk * rule.chunk if rule.chunk else begin
            end = row + (given.count[b] if both_ways else t + 1)
            for h in range(heads):
                g = h * k.shape[2] // heads
                scores = keys[g, begin:end].double() @ q[b, t, h].double() / width**0.5
                if rule.cap:
                    scores = rule.cap * torch.tanh(scores / rule.cap)
                if rule.slopes is not None:
                    scores = scores + rule.slopes[h].double() * torch.arange(begin + 1 - end, 1)
                if rule.sinks is not None:
                    scores = torch.cat((scores, rule.sinks[h : h + 1].double()))
                out[b, t, h] = scores.softmax(0)[: end - begin] @ values[g, begin:end].double()
    return out.flatten(2)


@every_kind
def test_attention_equals_the_textbook_formula(
    native: Native, heads: str, width: int, dtype: torch.dtype, rule: str
) -> None:
    for window in (1, 2, 5, 9):
        start = case(HEADS[heads], width, dtype=dtype, window=window)
        wanted, made = textbook(start, RULES[rule]), attend(native, start, RULES[rule])
        exact = 3e-6 if rule == "plain" and dtype in DTYPES else 1e-5
        torch.testing.assert_close(made.double(), wanted, rtol=1e-5 if exact < 1e-5 else 1e-4, atol=exact)
        for kernels in (TorchKernels(), *([TraceableKernels()] if dtype == torch.float32 else [])):
            found = attend(kernels, start, RULES[rule])
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "slides", "slides within its window", "capped", "sinks"])
def test_bidirectional_rows_attend_to_the_real_rows_of_their_window(native: Native, name: str) -> None:
    for window, count in ((1, [1, 1, 1]), (5, [5, 3, 1]), (9, [9, 4, 7])):
        start = case(HEADS["three to one"], window=window)
        start.count = count
        wanted = textbook(start, RULES[name], both_ways=True)
        for kernels in (native, TorchKernels(), TraceableKernels()):
            made = attend(kernels, start, RULES[name], both_ways=True).double()
            for b, n in enumerate(count):
                torch.testing.assert_close(made[b, :n], wanted[b, :n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, *NARROW])
@pytest.mark.parametrize("width", [8, 12, 48])
def test_exactly_the_windows_cache_rows_are_written(native: Native, width: int, dtype: torch.dtype) -> None:
    """Rounded as PyTorch does it, also where a number has no 16 bits that are near it."""
    start = case(width=width, dtype=dtype)
    start.qkv[1][0, 1, :, :6] = start.qkv[2][1, 0, :, :6] = torch.tensor([-0.0, 1.00390625, 1e-40, 1e-8, -1.0, 0.1])
    if dtype in DTYPES:
        start.qkv[1][0, 2, :, :4] = start.qkv[2][0, 2, :, :4] = torch.tensor([3.3e38, 65504.0, 65519.0, 70000.0])
    start.count = [5, 3, 1]
    expected, used = start.copied(), start.copied()
    native.attend(used.qkv, used.cache, used.place)
    for cache, made, new in zip(expected.cache, used.cache, start.qkv[1:], strict=True):
        for b, (row, count, slot) in enumerate(zip(start.row, start.count, start.slots, strict=True)):
            for t in range(count):
                cache[slot, :, row + t] = cache_rows.pack(new[b, t], dtype)
        assert same(made, cache)


def test_rows_after_the_count_are_zero_and_have_no_effect(native: Native) -> None:
    start = case()
    start.count = [5, 2, 0]
    made = attend(native, start)
    torch.testing.assert_close(made.double(), textbook(start), rtol=1e-5, atol=3e-6)
    assert not made[1, 2:].any() and not made[2].any()
    other = start.copied()
    for part in other.qkv:
        part[1, 2:], part[2] = float("nan"), float("nan")
    assert torch.equal(native.attend(other.qkv, other.cache, other.place), made)
    assert not any(c.isnan().any() for c in other.cache)


@every_kind
def test_a_row_has_the_same_bits_in_every_window(
    native: Native, heads: str, width: int, dtype: torch.dtype, rule: str
) -> None:
    """A text of nine tokens: all at once, one by one, and in every split; a row's result never changes."""
    start = case(HEADS[heads], width, dtype=dtype, window=9)
    whole = attend(native, start, RULES[rule])
    for sizes in ([1] * 9, [2] * 4 + [1], [4, 5], [5, 4], [8, 1], [1, 8], [3, 3, 3], [7, 2]):
        parts, done, used = [], 0, start.copied()
        for size in sizes:
            part = used.windows(done, size)
            parts.append(native.attend(part.qkv, part.cache, part.place, rule=RULES[rule]))
            done += size
        assert torch.equal(torch.cat(parts, 1), whole)


def test_a_row_has_the_same_bits_with_other_batch_rows_and_in_any_slot(native: Native) -> None:
    start = case()
    whole = attend(native, start)
    for b in range(3):
        qkv = tuple(x[b : b + 1] for x in start.qkv)
        alone = replace(start, qkv=qkv, row=start.row[b : b + 1], count=[5], slots=start.slots[b : b + 1])
        assert torch.equal(attend(native, alone), whole[b : b + 1])
        moved = replace(alone.copied(), slots=[1])
        for to, source in zip(moved.cache, start.cache, strict=True):
            to[1] = source[start.slots[b]]
        assert torch.equal(attend(native, moved), whole[b : b + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_rows_do_not_affect_attention(native: Native, dtype: torch.dtype) -> None:
    """Junk in the rest of the window and in the cache rows after it; finite, as activations are."""
    for kept in range(5):
        start = case(dtype=dtype)
        dirty = start.copied()
        dirty.qkv = tuple(torch.cat((x[:, : kept + 1], torch.randn_like(x[:, kept + 1 :]) * 100), 1) for x in dirty.qkv)  # type: ignore[assignment]
        for side in dirty.cache:
            for b, slot in enumerate(start.slots):
                side[slot, :, start.row[b] + 5 :] = float("nan")
            side[1] = float("nan")  # a slot that is not asked for
        assert torch.equal(attend(native, dirty)[:, : kept + 1], attend(native, start)[:, : kept + 1])


def test_attention_is_the_same_with_any_number_of_threads(native: Native, restored_threads: None) -> None:
    start, seen = case((8, 4), 48, window=9), []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        seen.append(attend(native, start))
    assert all(torch.equal(seen[0], other) for other in seen)


def test_extreme_and_equal_scores_are_right(native: Native) -> None:
    for scale in (0.0, 30.0, 1e4):
        start = case()
        start.qkv[0].mul_(scale)
        made = attend(native, start)
        assert made.isfinite().all()
        torch.testing.assert_close(made.double(), textbook(start), rtol=1e-3, atol=1e-3)


# ---- trees


def way_down(parents: tuple[int, ...], node: int) -> list[int]:
    """Rows of the window from the root to a node."""
    way: list[int] = []
    while node != tree.ROOT:
        way.insert(0, node + 1)
        node = parents[node]
    return [0, *way]


def as_chain(start: Case, way: list[int]) -> Case:
    qkv = tuple(x[:, way].contiguous() for x in start.qkv)
    return replace(start, qkv=qkv, count=[len(way)] * 3)


@every_kind
def test_a_node_has_the_bits_of_a_chain_of_its_ancestors(
    native: Native, heads: str, width: int, dtype: torch.dtype, rule: str
) -> None:
    start = case(HEADS[heads], width, dtype=dtype, window=9)
    made = attend(native, start, RULES[rule], parents=TREE)
    for kernels in (TorchKernels(), *([TraceableKernels()] if dtype == torch.float32 else [])):
        torch.testing.assert_close(attend(kernels, start, RULES[rule], parents=TREE), made, rtol=1e-4, atol=1e-5)
    for node in range(len(TREE)):
        way = way_down(TREE, node)
        assert torch.equal(attend(native, as_chain(start, way), RULES[rule])[:, -1], made[:, way[-1]])


@settings(max_examples=30)
@given(st.integers(0, 8).flatmap(lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n)))))
def test_any_tree_agrees_with_plain_pytorch_and_with_its_chains(parents: tuple[int, ...]) -> None:
    native, start = Native(), case(window=len(parents) + 1)
    made = attend(native, start, parents=parents)
    torch.testing.assert_close(made, attend(TorchKernels(), start, parents=parents), rtol=1e-4, atol=1e-5)
    for node in range(len(parents)):
        assert torch.equal(made[:, node + 1], attend(native, as_chain(start, way_down(parents, node)))[:, -1])


@pytest.mark.parametrize("kernels", [Native(), TorchKernels()], ids=["native", "plain"])
@pytest.mark.parametrize("dtype", [*DTYPES, *NARROW])
def test_compacting_a_path_leaves_the_cache_of_a_chain(kernels: Kernels, dtype: torch.dtype) -> None:
    start = case(dtype=dtype, window=9)
    ways = [way_down(TREE, 6), way_down(TREE, 7), [0]]  # one path for every line; the last accepts nothing
    used = start.copied()
    kernels.attend(used.qkv, used.cache, place_of(used, TREE))
    path = torch.tensor([way[1:] + [PAD] * (5 - len(way)) for way in ways], dtype=torch.int32)
    kernels.compact_path(used.cache, used.place.row, path, slots=used.place.slots)
    for line, way in enumerate(ways):
        wanted = as_chain(start.copied(), way)
        kernels.attend(wanted.qkv, wanted.cache, wanted.place)
        end, slot = start.row[line] + len(way), start.slots[line]
        for made, other in zip(used.cache, wanted.cache, strict=True):
            assert same(made[slot, :, :end], other[slot, :, :end])
