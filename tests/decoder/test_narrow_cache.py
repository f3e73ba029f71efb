"""Keys and values in 8 bits: their rows, and models that hold them. Attention over them: `test_native_attend.py`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from paceline.decoder import memory
from paceline.decoder.kernels import cache_rows
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
