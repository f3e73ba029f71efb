"""Keys and values in 8 bits: their rows, attention over them, and the same tokens however a text was read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigurationError
from paceline.decoder import memory
from paceline.decoder.kernels import cache_rows
from paceline.decoder.kernels.protocol import CachePosition, Tree
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native.ops import Native
from tests.decoder import tiny
from tests.decoder.other_kernels import numbers

FORMATS = list(cache_rows.CACHE_DTYPES)
PROMPTS = [[5, 9, 13, 5, 9], [40, 2]]


load = partial(tiny.load, amp="bf16", batch_size=2, context_length_estimate=[tiny.CHUNK])


@pytest.fixture(scope="module")
def folder(workshop: tiny.Workshop) -> Path:
    return workshop.checkpoint()


@pytest.mark.parametrize("form", FORMATS)
def test_a_cached_row_is_near_its_values_and_stores_its_scale(form: str) -> None:
    dtype, rows = cache_rows.CACHE_DTYPES[form], numbers(40, 12) * torch.logspace(-20, 6, 40, base=2)[:, None]
    rows[3] = 0
    packed = cache_rows.pack(rows, dtype)
    assert packed.dtype is dtype and packed.shape == (40, 12 + cache_rows.SCALE_BYTES)
    found, largest = cache_rows.unpack(packed), rows.abs().amax(1, keepdim=True)
    bound = {"int8": 1 / 254, "fp8_e4m3": 1 / 16}[form]
    assert bool(((found - rows).abs() <= bound * 1.001 * largest).all())
    assert not found[3].any()
    assert torch.equal(cache_rows.unpack(packed[7]), found[7])  # of this row alone


def _both(form: str, *, tree: bool, window: int = 7) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
    """Attention of the native kernels and of plain PyTorch over the same cache; and the caches afterwards."""
    dtype, slots, groups, rows, width = cache_rows.CACHE_DTYPES[form], 2, 2, 64, 12
    qkv = (
        numbers(2, window, 4, width),
        numbers(2, window, groups, width, seed=1),
        numbers(2, window, groups, width, seed=2),
    )
    start = torch.tensor([20, 33], dtype=torch.int32)
    count = torch.full((2,), window, dtype=torch.int32)
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5]] * 2, dtype=torch.int32)
    place = CachePosition(
        start, count, torch.arange(2, dtype=torch.int32), rows, tree=Tree.of(parents) if tree else None
    )
    found, caches = [], []
    for kernels in (Native(), TorchKernels()):
        cache = tuple(cache_rows.pack(numbers(slots, groups, rows, width, seed=s), dtype) for s in (3, 4))
        found.append(kernels.attend(qkv, (cache[0], cache[1]), place))
        path = torch.tensor([[2, 5, 6, -1]] * 2, dtype=torch.int32)
        if tree:
            kernels.compact_path((cache[0], cache[1]), start, path, slots=place.slots)
        caches.append(cache)
    return found, caches


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_native_kernels_write_the_same_bytes_and_attend_equally(form: str, tree: bool) -> None:
    (native, plain), caches = _both(form, tree=tree)
    torch.testing.assert_close(native, plain, rtol=1e-4, atol=1e-5)
    for one, other in zip(*caches, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("form", FORMATS)
def test_a_rows_bits_do_not_depend_on_its_window(form: str) -> None:
    """Read together, in two pieces, and one token at a time: the same results, and the same cache."""
    native, dtype, groups, rows, width, length = Native(), cache_rows.CACHE_DTYPES[form], 2, 32, 16, 13
    q, k, v = (numbers(1, length, heads, width, seed=heads + i) for i, heads in enumerate((4, groups, groups)))
    slots, made = torch.zeros(1, dtype=torch.int32), []
    for cuts in ([length], [5, length], list(range(1, length + 1))):
        cache = [torch.zeros(1, groups, rows, width + cache_rows.SCALE_BYTES, dtype=dtype) for _ in range(2)]
        parts, begin = [], 0
        for end in cuts:
            at = torch.full((1,), begin, dtype=torch.int32)
            place = CachePosition(at, torch.full_like(at, end - begin), slots, rows)
            window = (q[:, begin:end], k[:, begin:end], v[:, begin:end])
            parts.append(native.attend(window, (cache[0], cache[1]), place))
            begin = end
        made.append((torch.cat(parts, 1), *(one.view(torch.uint8) for one in cache)))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


@pytest.mark.usefixtures("two_ranks")
def test_a_model_on_two_ranks_gives_the_tokens_of_one(folder: Path) -> None:
    one = load(folder, amp="f32", kv_cache_dtype="int8")
    two = load(folder, amp="f32", kv_cache_dtype="int8", tp_degree=2)
    try:
        assert torch.equal(two.sample(PROMPTS, max_new_tokens=24), one.sample(PROMPTS, max_new_tokens=24))
    finally:
        two.close()


def test_an_8_bit_cache_takes_less_memory_and_separate_graphs(folder: Path) -> None:
    narrow, wide = load(folder, kv_cache_dtype="int8"), load(folder)
    for one in (narrow, wide):
        held = sum(part.nbytes for layer in one.body.caches for part in layer)
        assert memory.cache_bytes(one.body.shard, one.options) == held
    assert memory.cache_bytes(narrow.body.shard, narrow.options) * 16 == 12 * memory.cache_bytes(
        wide.body.shard, wide.options
    )
    assert narrow.cache_key() == {**wide.cache_key(), "kv_cache_dtype": "int8"}


def test_unsupported_cache_formats_are_rejected_by_name(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"kv_cache_dtype: expected one of int8, fp8_e4m3, fp8_.*, got 'int4'"):
        load(folder, kv_cache_dtype="int4")
    for backend in ("neuron", "xla", "neuron-native"):
        with pytest.raises(ConfigurationError, match=r"kv_cache_dtype='int8' asks for 8 bits; .* eager, native"):
            load(folder, backend=backend, kv_cache_dtype="int8")
