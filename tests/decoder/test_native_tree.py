"""A window that is a tree: every node attends to its own ancestors, with the bits a chain of them would have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import tree
from paceline.core.types import PAD
from paceline.decoder.kernels.protocol import CachePosition, Kernels, Tree
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native.ops import Native
from tests.decoder.test_native_attend import DTYPES, HEADS, Case, case

TREE = (-1, -1, 0, 0, 1, 2, 5, 4)


def rows_of(parents: tuple[int, ...], lines: int) -> Tensor:
    return torch.tensor([tree.verify_rows(parents)] * lines, dtype=torch.int32)


def planted(given: Case, parents: tuple[int, ...]) -> CachePosition:
    return replace(given.place, tree=Tree.of(rows_of(parents, 3)))


def way_down(parents: tuple[int, ...], node: int) -> list[int]:
    """Rows of the window from the root to a node."""
    way: list[int] = []
    while node != tree.ROOT:
        way.insert(0, node + 1)
        node = parents[node]
    return [0, *way]


def as_chain(given: Case, way: list[int]) -> Case:
    qkv = tuple(x[:, way].contiguous() for x in given.qkv)
    return replace(given.copied(), qkv=qkv, count=[len(way)] * 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [12, 48])
def test_a_node_has_the_bits_of_a_chain_of_its_ancestors(heads: str, dtype: torch.dtype, width: int) -> None:
    native, start = Native(), case(HEADS[heads], width, dtype=dtype, window=9)
    made = native.attend(start.qkv, start.copied().cache, planted(start, TREE))
    for node in range(len(TREE)):
        way = way_down(TREE, node)
        chain = as_chain(start, way)
        assert torch.equal(native.attend(chain.qkv, chain.cache, chain.place)[:, -1], made[:, way[-1]])


@settings(max_examples=30)
@given(st.integers(0, 8).flatmap(lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n)))))
def test_any_tree_agrees_with_plain_pytorch_and_with_its_chains(parents: tuple[int, ...]) -> None:
    start = case(window=len(parents) + 1)
    made = {}
    for kernels in (Native(), TorchKernels()):
        made[kernels.batch_invariant] = kernels.attend(start.qkv, start.copied().cache, planted(start, parents))
    torch.testing.assert_close(made[True], made[False], rtol=1e-4, atol=1e-5)
    for node in range(len(parents)):
        chain = as_chain(start, way_down(parents, node))
        wanted = Native().attend(chain.qkv, chain.cache, chain.place)[:, -1]
        assert torch.equal(made[True][:, node + 1], wanted)


@pytest.mark.parametrize("kernels", [Native(), TorchKernels()], ids=["native", "plain"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compacting_a_path_leaves_the_cache_of_a_chain(kernels: Kernels, dtype: torch.dtype) -> None:
    start = case(dtype=dtype, window=9)
    ways = [way_down(TREE, 6), way_down(TREE, 7), [0]]  # one path for every line; the last accepts nothing
    used = start.copied()
    kernels.attend(used.qkv, used.cache, planted(used, TREE))
    path = torch.tensor([way[1:] + [PAD] * (5 - len(way)) for way in ways], dtype=torch.int32)
    place = used.place
    kernels.compact_path(used.cache, place.row, path, slots=place.slots)
    for line, way in enumerate(ways):
        wanted = as_chain(start, way)
        kernels.attend(wanted.qkv, wanted.cache, wanted.place)
        end, slot = start.row[line] + len(way), start.slots[line]
        for side in (0, 1):
            assert torch.equal(used.cache[side][slot, :, :end], wanted.cache[side][slot, :, :end])
