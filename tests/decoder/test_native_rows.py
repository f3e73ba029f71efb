"""Native operations between matmuls: the numbers of plain PyTorch, and a row's bits independent of other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.plain import ACTIVATIONS, NORMS, NormKind, PlainOperations
from paceline.decoder.native.ops import Native
from tests.decoder.other_kernels import numbers

PLAIN = PlainOperations()


def same_rows(made: Tensor, one_by_one: list[Tensor]) -> None:
    assert torch.equal(made, torch.cat(one_by_one, 1))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 13, 576])
def test_native_norms_equal_pytorch(native: Native, kind: NormKind, dtype: torch.dtype, width: int) -> None:
    x, weight = numbers(2, 5, width) + 0.5, (numbers(width, seed=1) + 1).to(dtype)
    bias = numbers(width, seed=2).to(dtype) if kind == "layer" else None
    made = native.norm(x, weight, eps=1e-5, bias=bias, kind=kind)
    torch.testing.assert_close(made, PLAIN.norm(x, weight, eps=1e-5, bias=bias, kind=kind), rtol=1e-5, atol=1e-5)
    rows = [native.norm(x[:, i : i + 1].contiguous(), weight, eps=1e-5, bias=bias, kind=kind) for i in range(5)]
    same_rows(made, rows)


@pytest.mark.parametrize(("batch", "window"), [(1, 1), (3, 1), (1, 5), (2, 5)])
@pytest.mark.parametrize(("width", "turned"), [(12, 12), (12, 4)])
def test_rotations_within_wider_rows_equal_pytorch(
    native: Native, batch: int, window: int, width: int, turned: int
) -> None:
    heads = numbers(batch, window, 5 * width).split((3 * width, 2 * width), -1)[1].view(batch, window, 2, width)
    rotation = (numbers(batch, window, 1, turned, seed=1), numbers(batch, window, 1, turned, seed=2))
    torch.testing.assert_close(native.rotate(heads, rotation), PLAIN.rotate(heads, rotation))


def test_non_adjacent_heads_are_rejected(native: Native) -> None:
    with pytest.raises(RuntimeError, match="one after the other"):
        native.rotate(numbers(2, 3, 8, 4).transpose(2, 3), (numbers(2, 3, 1, 8), numbers(2, 3, 1, 8)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [8, 11])
def test_native_activations_equal_pytorch(native: Native, activation: str, gated: bool, width: int) -> None:
    x = 3 * numbers(2, 5, 2 * width if gated else width)
    made = native.activate(x, activation, gated=gated)
    torch.testing.assert_close(made, PLAIN.activate(x, activation, gated=gated), rtol=1e-5, atol=1e-6)
    same_rows(made, [native.activate(x[:, i : i + 1].contiguous(), activation, gated=gated) for i in range(5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [8, 11])
def test_embedding_lookup_equals_pytorch(native: Native, dtype: torch.dtype, width: int) -> None:
    table, ids = numbers(7, width).to(dtype), torch.tensor([[0, 6, 3], [3, 3, 1]], dtype=torch.int32)
    assert torch.equal(native.embed(table, ids), PLAIN.embed(table, ids))
