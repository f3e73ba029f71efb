"""Native operations on rows: the numbers of plain PyTorch, and for a row the same bits whatever rows are next to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline.core import noise
from paceline.core.sampling import sampling_tensors
from paceline.decoder.kernels.plain import ACTIVATIONS, NORMS, NormKind, PlainOperations
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native import build
from paceline.decoder.native.ops import Native
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import PackedMatrix, quantize
from tests.decoder.other_kernels import call, numbers
from tests.decoder.test_native_choose import PARAMS
from tests.decoder.test_native_experts import SHAPES as MIXTURES
from tests.decoder.test_native_experts import mixture, quantised, shares_of
from tests.decoder.test_native_layer import layer

PLAIN = PlainOperations()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

ROWS = 70
WIDTHS = [*range(2, 14), 16, 23, 25, 31, 33, 64, 69, 70]
SHAPES = [(1, 1), (3, 2), (7, 5), (8, 8), (15, 1), (16, 16), (17, 3), (33, 96), (48, 31), (100, 101), (384, 130)]
"""K and N; some odd, some below a vector, some multiples of it."""
LARGE = [(384, 131), (100, 997)]
"""Past the size at which threads are used at all."""


@dataclass(frozen=True)
class Operation:
    """An operation on the rows of its inputs, each of [1, ROWS, ...].

    run  of the kernels, a count of real rows or None, and the inputs
    ids  number of tokens to choose from; 0: results are no tokens
    """

    inputs: tuple[Tensor, ...]
    run: Callable[..., Tensor]
    ids: int = 0

    def of(self, native: Native, rows: slice) -> Tensor:
        return self.run(native, None, *(x[:, rows].contiguous() for x in self.inputs))


def product(dtype: torch.dtype, shape: tuple[int, int]) -> Operation:
    K, N = shape
    weight = numbers(N, K, seed=1).to(dtype)
    return Operation((numbers(1, ROWS, K),), lambda native, count, x: native.linear(x, weight, count))


def product_of(form: WeightFormat) -> Operation:
    weight = PackedMatrix(quantize(numbers(37, 128, seed=1), form))
    return Operation((numbers(1, ROWS, 128),), lambda native, count, x: native.linear(x, weight, count))


def experts(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, plain: bool = False, biased: bool = False
) -> Operation:
    weights = mixture(shape, dtype)
    if biased:
        weights = replace(weights, gate_up_bias=8 * numbers(len(weights.gate_up), seed=5), activation="clamped swish")  # type: ignore[arg-type]

    def run(native: Native, count: Tensor | None, x: Tensor, shares: Tensor) -> Tensor:
        return (TorchKernels() if plain else native.mixture).experts(x, shares, weights, count=count)

    return Operation((numbers(1, ROWS, shape[2]), shares_of(shape, ROWS)), run)


def experts_of(form: WeightFormat) -> Operation:
    shape = (8, 2, 96, 64)
    weights, inputs = quantised(mixture(shape, torch.float32), form), (numbers(1, ROWS, 96), shares_of(shape, ROWS))
    return Operation(inputs, lambda native, count, *given: native.mixture.experts(*given, weights, count=count))


def mlp(dtype: torch.dtype, *, biased: bool) -> Operation:
    made = layer(dtype, biased=biased)
    return Operation((numbers(1, ROWS, 40),), lambda native, count, x: native.mlp(x, made.mlp, count))


def norm(kind: NormKind, dtype: torch.dtype) -> Operation:
    weight, bias = numbers(13, seed=1).to(dtype), numbers(13, seed=2).to(dtype) if kind == "layer" else None
    return Operation(
        (numbers(1, ROWS, 13) + 0.5,), lambda native, _, x: native.norm(x, weight, eps=1e-5, bias=bias, kind=kind)
    )


def activation(kind: str, *, gated: bool) -> Operation:
    return Operation((3 * numbers(1, ROWS, 22),), lambda native, _, x: native.activate(x, kind, gated=gated))


def choice(number: int, size: int) -> Operation:
    sampling = sampling_tensors([PARAMS[number]])
    inputs = (numbers(1, ROWS, size) * 3, torch.arange(ROWS, dtype=torch.int32).unsqueeze(0) * 977)
    return Operation(
        inputs, lambda native, _, x, at: native.sample_tokens(x, at, sampling, stream=noise.TARGET), ids=size
    )


def probabilities(number: int, size: int) -> Operation:
    sampling = sampling_tensors([PARAMS[number]])
    return Operation((numbers(1, ROWS, size) * 3,), lambda native, _, x: native.probabilities(x, sampling))


OPERATIONS: dict[str, Callable[[], Operation]] = {
    **{f"product {d}, {s}": partial(product, d, s) for d in DTYPES for s in (*SHAPES, *LARGE)},
    **{f"product of {form.value}": partial(product_of, form) for form in WeightFormat},
    **{f"experts {d}, {s}": partial(experts, s, d) for d in DTYPES for s in (*MIXTURES, (6, 2, 260, 131))},
    **{f"plain experts {d}, {s}": partial(experts, s, d, plain=True) for d in DTYPES for s in MIXTURES},
    **{f"biased experts {s}": partial(experts, s, torch.float32, biased=True) for s in MIXTURES},
    **{f"experts of {form.value}": partial(experts_of, form) for form in WeightFormat},
    **{f"MLP {d}, {biased}": partial(mlp, d, biased=biased) for d in DTYPES for biased in (False, True)},
    **{f"norm {kind}, {d}": partial(norm, kind, d) for kind in NORMS for d in DTYPES},
    **{f"{kind}, {gated}": partial(activation, kind, gated=gated) for kind in ACTIVATIONS for gated in (False, True)},
    **{f"choice {n} of {size}": partial(choice, n, size) for n in range(len(PARAMS)) for size in (7, 100, 4096)},
    **{f"probabilities {n}": partial(probabilities, n, 4096) for n in range(len(PARAMS))},
}
COUNTED = [name for name in OPERATIONS if name.startswith(("product", "experts", "biased experts", "MLP"))]
"""Those that take a count of real rows."""
every_operation = pytest.mark.parametrize("name", OPERATIONS)
every_native_operation = pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("plain")])


@every_operation
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(native: Native, name: str) -> None:
    operation = OPERATIONS[name]()
    alone = torch.cat([operation.of(native, slice(i, i + 1)) for i in range(ROWS)], 1)
    for width in WIDTHS:
        for begin in {0, 3, ROWS - width} if width + 3 <= ROWS else {0}:
            rows = slice(begin, begin + width)
            assert torch.equal(operation.of(native, rows), alone[:, rows])
    if name in COUNTED:
        lines = operation.run(native, None, *(x.view(7, 10, -1) for x in operation.inputs))
        assert torch.equal(lines.view_as(alone), alone)


@every_native_operation
def test_junk_in_other_rows_changes_no_bit(native: Native, name: str) -> None:
    operation = OPERATIONS[name]()
    x, *others = (one[:, :9].contiguous() for one in operation.inputs)
    clean = operation.run(native, None, x, *others)
    for junk in (float("nan"), float("inf"), -float("inf"), 3e38):
        for kept in range(9):
            dirty = torch.full_like(x, junk)
            dirty[:, kept] = x[:, kept]
            made = operation.run(native, None, dirty, *others)
            assert torch.equal(made[:, kept], clean[:, kept])
            assert not operation.ids or bool(((made >= 0) & (made < operation.ids)).all())


@every_native_operation
def test_any_number_of_threads_gives_the_same_bits(native: Native, restored_threads: None, name: str) -> None:
    operation, seen = OPERATIONS[name](), []
    before = [x.clone() for x in operation.inputs]
    for threads in (1, 2, 3, 5, 8):
        torch.set_num_threads(threads)
        seen.append(operation.of(native, slice(0, 24)))
        assert torch.equal(torch.cat([operation.of(native, slice(i, i + 1)) for i in range(6)], 1), seen[0][:, :6])
    assert all(torch.equal(seen[0], other) for other in seen)
    assert all(map(torch.equal, operation.inputs, before))


@pytest.mark.parametrize("name", COUNTED)
def test_padding_is_zero_and_real_rows_are_bitwise_identical(native: Native, name: str) -> None:
    operation, count = OPERATIONS[name](), [10, 4, 1, 0, 7, 2, 9]
    inputs = [x.view(7, 10, -1).clone() for x in operation.inputs]
    whole = operation.run(native, None, *inputs)
    for x in inputs:
        for line, real in enumerate(count):
            x[line, real:] = float("nan")
    made = operation.run(native, torch.tensor(count, dtype=torch.int32), *inputs)
    for line, real in enumerate(count):
        assert torch.equal(made[line, :real], whole[line, :real])
        assert not made[line, real:].any()


# ---- the numbers


def multiplied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The activations as a product with weights of this type takes them: bfloat16 ones are multiplied in pairs."""
    return x.bfloat16().float() if dtype == torch.bfloat16 else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_product_accumulates_in_float32(native: Native, shape: tuple[int, int], dtype: torch.dtype) -> None:
    K, N = shape
    weight = numbers(N, K, seed=1).to(dtype)
    for rows in (1, *WIDTHS):
        x = numbers(1, rows, K)
        made = native.linear(x, weight)
        x = multiplied(x, dtype)
        exact = x.double() @ weight.double().T
        room = x.abs().double() @ weight.abs().double().T * (K + 1) * 2.0**-24 + 1e-30  # any order of summing
        assert made.dtype == torch.float32
        assert made.shape == (1, rows, N)
        assert ((made - exact).abs() <= room).all()
        torch.testing.assert_close(made, TorchKernels().linear(x, weight), rtol=1e-4, atol=1e-4)


def test_non_contiguous_inputs_give_the_same_result(native: Native) -> None:
    weight, x = numbers(6, 24), numbers(24, 5, 1)
    turned = x.transpose(0, 2)
    assert torch.equal(native.linear(turned, weight), native.linear(turned.contiguous(), weight))


def test_a_smaller_matmul_after_a_larger_one_is_right(native: Native) -> None:
    """The kernel keeps its scratch memory between calls."""
    small, x = numbers(5, 17, seed=1).bfloat16(), numbers(1, 2, 17)
    before = native.linear(x, small)
    native.linear(torch.full((1, 70, 384), float("nan")), numbers(8, 384).bfloat16())
    assert torch.equal(native.linear(x, small), before)


def test_an_unread_batch_row_is_neither_computed_nor_written(native: Native) -> None:
    """Its count is below 0: -1 - n with n rows. Lines of idle slots times a vocabulary are more than all else."""
    weight, x = numbers(130, 384, seed=1), numbers(4, 9, 384)
    out, count = torch.full((4, 9, 130), 7.0), torch.tensor([-1, 9, -4, 2], dtype=torch.int32)
    call(build.library(), "paceline_linear_real", x, weight, None, out, count, 4, 9, 384, 130, 0)
    assert (out[0] == 7).all() and (out[2, 3:] == 7).all() and not out[3, 2:].any()
    assert torch.equal(out[2, :3], native.linear(x, weight)[2, :3])
    assert torch.equal(out[1], native.linear(x, weight)[1]) and torch.equal(out[3, :2], native.linear(x, weight)[3, :2])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 13, 576])
def test_native_norms_equal_pytorch(native: Native, kind: NormKind, dtype: torch.dtype, width: int) -> None:
    x, weight = numbers(2, 5, width) + 0.5, (numbers(width, seed=1) + 1).to(dtype)
    bias = numbers(width, seed=2).to(dtype) if kind == "layer" else None
    made = native.norm(x, weight, eps=1e-5, bias=bias, kind=kind)
    torch.testing.assert_close(made, PLAIN.norm(x, weight, eps=1e-5, bias=bias, kind=kind), rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 11])
def test_embedding_lookup_equals_pytorch(native: Native, dtype: torch.dtype, width: int) -> None:
    table, ids = numbers(7, width).to(dtype), torch.tensor([[0, 6, 3], [3, 3, 1]], dtype=torch.int32)
    assert torch.equal(native.embed(table, ids), PLAIN.embed(table, ids))
