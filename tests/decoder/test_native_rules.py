"""Native attention with sliding windows, chunks, soft caps, sinks and ALiBi: right, the same bits in every window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.protocol import AttentionRule, Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native.ops import Native
from paceline.neuron.kernels import TraceableKernels
from tests.decoder.test_native_attend import Case, case, textbook
from tests.decoder.test_native_tree import TREE, as_chain, planted, way_down

HEADS = (6, 2)
SLOPES = torch.tensor([0.5, 0.3, 0.2, 0.1, 0.05, 0.01])
SINKS = torch.tensor([3.0, -1.0, 0.0, 0.5, 9.0, -40.0])
RULES = {
    "slides": AttentionRule(window=7),
    "slides within its window": AttentionRule(window=2),
    "capped": AttentionRule(cap=0.8),
    "falls": AttentionRule(slopes=SLOPES),
    "sinks": AttentionRule(sinks=SINKS),
    "in chunks": AttentionRule(chunk=5),
    "slides and sinks": AttentionRule(window=7, sinks=SINKS),
    "all": AttentionRule(window=21, cap=1.5, slopes=SLOPES),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def attend(
    kernels: Kernels, given: Case, rule: AttentionRule, *, tree: bool = False, both_ways: bool = False
) -> Tensor:
    own = given.copied()
    place = planted(own, TREE) if tree else replace(own.place, both_ways=both_ways)
    return kernels.attend(own.qkv, own.cache, place, rule=rule)


@every_rule
@pytest.mark.parametrize("width", [12, 48])
def test_every_attention_kernel_follows_the_attention_rule(native: Native, rule: AttentionRule, width: int) -> None:
    for window in (1, 5, 9):
        given = case(HEADS, width, window=window, seed=window)
        for kernels in (native, TorchKernels(), TraceableKernels()):
            torch.testing.assert_close(
                attend(kernels, given, rule).double(), textbook(given, rule), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", ["slides", "slides within its window", "capped", "sinks"])
def test_bidirectional_rows_attend_to_the_real_rows_of_their_window(native: Native, name: str) -> None:
    for window, count in ((1, [1, 1, 1]), (5, [5, 3, 1]), (9, [9, 4, 7])):
        given = case(HEADS, 16, window=window, seed=window)
        given.count = count
        wanted = textbook(given, RULES[name], both_ways=True)
        for kernels in (native, TorchKernels(), TraceableKernels()):
            made = attend(kernels, given, RULES[name], both_ways=True).double()
            for b, n in enumerate(count):
                torch.testing.assert_close(made[b, :n], wanted[b, :n], rtol=1e-4, atol=1e-5)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_window(native: Native, rule: AttentionRule, dtype: torch.dtype) -> None:
    given = case(HEADS, 16, dtype=dtype, window=9)
    whole = attend(native, given, rule)
    for size in (1, 2, 4):
        own = given.copied()
        for begin in range(0, 9, size):
            qkv = tuple(x[:, begin : begin + size].contiguous() for x in own.qkv)
            count = [qkv[0].shape[1]] * 3
            part = replace(own, qkv=qkv, row=[row + begin for row in own.row], count=count)
            made = native.attend(part.qkv, part.cache, part.place, rule=rule)
            assert torch.equal(made, whole[:, begin : begin + size])


@every_rule
def test_a_tree_node_has_the_bits_of_a_chain_under_every_rule(native: Native, rule: AttentionRule) -> None:
    start = case(HEADS, 16, window=9)
    made = attend(native, start, rule, tree=True)
    for kernels in (TorchKernels(), TraceableKernels()):
        torch.testing.assert_close(attend(kernels, start, rule, tree=True), made, rtol=1e-4, atol=1e-5)
    for node in range(len(TREE)):
        way = way_down(TREE, node)
        chain = as_chain(start, way)
        assert torch.equal(native.attend(chain.qkv, chain.cache, chain.place, rule=rule)[:, -1], made[:, way[-1]])
