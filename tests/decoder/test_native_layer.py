"""The halves of a layer as one operation each: what plain PyTorch computes, and the same bits in every company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.core import tree
from paceline.decoder.kernels.protocol import AttentionWeights, CachePosition, MlpWeights, Tree
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.config import RopeConfig
from paceline.decoder.models.layers import gated_mlp
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.native.ops import Native
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.weights.quantize import MatrixLike
from tests.decoder.other_kernels import numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH, HEADS, GROUPS, D, MLP, ROWS = 40, 4, 2, 12, 52, 64
COUNTS = [9, 4, 0]
START = [7, 0, 30]
EPS = (0.2, 0.5)  # of the two norms: large enough to be missed, and unlike each other


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer and a cache of three slots."""

    attention: AttentionWeights
    mlp: MlpWeights
    cache: tuple[Tensor, Tensor]

    def copied(self) -> tuple[Tensor, Tensor]:
        return self.cache[0].clone(), self.cache[1].clone()


def layer(dtype: torch.dtype, *, biased: bool) -> Layer:
    def weight(seed: int, *shape: int) -> Tensor:
        return (numbers(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)

    def bias(seed: int, size: int) -> Tensor | None:
        return numbers(size, seed=seed).to(dtype) if biased else None

    every = (HEADS + 2 * GROUPS) * D
    attention = AttentionWeights(
        (1 + weight(1, WIDTH)).to(dtype), weight(2, every, WIDTH), bias(3, every), weight(4, WIDTH, HEADS * D),
        bias(5, WIDTH), EPS[0],
    )  # fmt: skip
    mlp = MlpWeights(
        (1 + weight(6, WIDTH)).to(dtype), weight(7, 2 * MLP, WIDTH), bias(8, 2 * MLP), weight(9, WIDTH, MLP),
        bias(10, WIDTH), EPS[1],
    )  # fmt: skip
    return Layer(
        attention, mlp, (numbers(3, GROUPS, ROWS, D, seed=11).to(dtype), numbers(3, GROUPS, ROWS, D, seed=12).to(dtype))
    )


def place(counts: Sequence[int], window: int, *, parents: tuple[int, ...] | None = None) -> CachePosition:
    row, count, slots = (torch.tensor(x, dtype=torch.int32) for x in (START, counts, [2, 0, 1]))
    shape = None
    if parents is not None:
        shape = Tree.of(torch.tensor([tree.verify_rows(parents)] * 3, dtype=torch.int32))
        assert shape.parents.shape[1] == window
    return CachePosition(row, count, slots, ROWS, padded=True, tree=shape)


def rotation(at: CachePosition, window: int) -> tuple[Tensor, Tensor]:
    cos, sin = rope_tables(RopeConfig(), D, ROWS)
    rows = at.positions(window)
    return cos[rows].unsqueeze(2), sin[rows].unsqueeze(2)


class Reference(TorchKernels):
    """Plain PyTorch, with activations rounded as the native products round them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        return super().linear(x.bfloat16().float() if self.dtype == torch.bfloat16 else x, weight, count)


def plain(made: Layer, hidden: Tensor, at: CachePosition, cache: tuple[Tensor, Tensor]) -> Tensor:
    """The first half from the parts that every backend has."""
    w, window = made.attention, hidden.shape[1]
    reference, turn = Reference(made.mlp.down.dtype), rotation(at, window)
    mixed = reference.linear(reference.norm(hidden, w.norm.float(), eps=w.eps), w.qkv)
    mixed = mixed if w.qkv_bias is None else mixed + w.qkv_bias.float()
    q, k, v = mixed.unflatten(-1, (-1, D)).split((HEADS, GROUPS, GROUPS), dim=2)
    seen = reference.attend((reference.rotate(q, turn), reference.rotate(k, turn), v), cache, at)
    out = reference.linear(seen, w.out)
    return hidden + (out if w.out_bias is None else out + w.out_bias.float())


def real(x: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.cat([x[line, :count] for line, count in enumerate(counts)])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parents", [None, (-1, -1, 0, 0, 1, 2, 5, 4)], ids=["chain", "tree"])
def test_fused_attention_equals_its_parts(
    native: Native, dtype: torch.dtype, biased: bool, parents: tuple[int, ...] | None
) -> None:
    made, window = layer(dtype, biased=biased), 9
    counts = COUNTS if parents is None else [9, 9, 9]
    hidden, at = numbers(3, window, WIDTH, seed=20), place(counts, window, parents=parents)
    junk = hidden.clone()
    for line, count in enumerate(counts):
        junk[line, count:] = float("nan")
    ours, theirs = made.copied(), made.copied()
    found = native.attention(junk, made.attention, at, cache=ours, rotation=rotation(at, window))
    wanted = plain(made, hidden, at, theirs)
    torch.testing.assert_close(real(found, counts), real(wanted, counts), rtol=2e-3, atol=2e-3)
    for line, count in enumerate(counts):  # padding is finite, whatever it was
        assert not found[line, count:].any()
        slot, row = [2, 0, 1][line], START[line]
        for new, old, plainly in zip(ours, made.cache, theirs, strict=True):
            written, wanted_rows = (cache[slot, :, row : row + count].float() for cache in (new, plainly))
            torch.testing.assert_close(written, wanted_rows, rtol=1e-2, atol=1e-2)
            assert torch.equal(new[slot, :, :row], old[slot, :, :row])
            assert torch.equal(new[slot, :, row + count :], old[slot, :, row + count :])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 17, 40])
def test_the_fused_mlp_equals_its_parts(native: Native, dtype: torch.dtype, biased: bool, window: int) -> None:
    made, hidden = layer(dtype, biased=biased), numbers(3, window, WIDTH, seed=20)
    w, names = made.mlp, ("norm", "gate_up", "gate_up_bias", "down", "down_bias")
    wide = replace(w, **{name: x.float() for name in names if (x := getattr(w, name)) is not None})
    wanted = gated_mlp(hidden, wide, kernels=Reference(dtype), group=SingleRank())
    # A last bit of difference before a product may be one of bfloat16's in it: 2^-9 of a number, times a weight.
    room = 2e-3 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(native.mlp(hidden, w), wanted, rtol=room, atol=room)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_row_is_bitwise_independent_of_other_rows(
    native: Native, restored_threads: None, dtype: torch.dtype
) -> None:
    """A row has the same bits in any window or chunk, on any number of threads, and with junk in other slots."""
    made, size = layer(dtype, biased=True), 24
    text = numbers(3, size, WIDTH, seed=21)

    def read(text: Tensor, window: int) -> tuple[Tensor, ...]:
        cache, parts = made.copied(), []
        for begin in range(0, size, window):
            hidden = text[:, begin : begin + window]
            count = torch.full((3,), hidden.shape[1], dtype=torch.int32)
            row = torch.tensor(START, dtype=torch.int32) + begin
            at = CachePosition(row, count, torch.tensor([2, 0, 1], dtype=torch.int32), ROWS)
            half = native.attention(hidden, made.attention, at, cache=cache, rotation=rotation(at, hidden.shape[1]))
            parts.append(native.mlp(half, made.mlp))
        return torch.cat(parts, 1), *cache

    expected = read(text, 1)
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        for window in (1, 2, 5, 7, 24):
            assert all(torch.equal(a, b) for a, b in zip(read(text, window), expected, strict=True))
    for kept in range(3):
        junk = torch.full_like(text, float("nan"))
        junk[kept] = text[kept]
        assert torch.equal(read(junk, 5)[0][kept], expected[0][kept])
