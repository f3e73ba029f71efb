"""What a user chooses when a decoder is loaded, checked and completed; nothing about the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigurationError
from paceline.decoder.parallel.sharding import WHOLE, Layout
from paceline.decoder.weights.formats import CACHE_FORMATS, WeightFormat

if TYPE_CHECKING:
    import torch

AMP = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
"""PyTorch's names of the types, by ours."""

MAX_WIDTH = 128
"""Rows one window may have at most; caches carry as many rows of slack, so that no window runs over their end."""

CATCH_UP = 16
"""Tokens of the least prefill graph of a draft. What it missed in a round or two, while a free drafter proposed, is no
more, and a graph of 64 rows takes about three times as long."""


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Shapes and number format of a decoder.

    batch_size  slots; fixed, a slot without a request idles
    batch_buckets  numbers of slots for which rounds have graphs, ascending, the last is ``batch_size``; (): that alone
    kv_buckets     buckets of the cache length, ascending; the last is how long a text may be (n_positions)
    chunks      lengths of the prefill graphs, ascending; longer prompts are read in chunks of the largest
    amp         number format of weights, cache and products: "bf16", "f16" or "f32"
    layout      over how many ranks the model is divided, and how
    quantization  format of the matrices, as `paceline.decoder.weights.checkpoint.load_weights` takes it; None: ``amp``
    kv_cache_dtype  format of keys and values: "int8", "fp8_e4m3" or "fp8_e5m2"; None: ``amp``
    modules_to_not_convert  tables of the vocabulary that ``quantization`` leaves in ``amp``
    """

    batch_size: int
    kv_buckets: tuple[int, ...]
    chunks: tuple[int, ...]
    amp: str
    layout: Layout = WHOLE
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    modules_to_not_convert: tuple[str, ...] = ()
    batch_buckets: tuple[int, ...] = ()

    @property
    def n_positions(self) -> int:
        return self.kv_buckets[-1]

    @property
    def draft_chunks(self) -> tuple[int, ...]:
        """Lengths of the prefill graphs of a draft, which also reads with them what it missed."""
        return self.chunks if self.chunks[0] <= CATCH_UP else (CATCH_UP, *self.chunks)

    @property
    def rows(self) -> int:
        """Rows a cache has: all positions, and slack for a window or a padded chunk that begins at the last one."""
        return self.n_positions + max(MAX_WIDTH, self.chunks[-1])

    @property
    def dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, AMP[self.amp])
        return dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the tensors of the model's own cache; draft heads keep theirs in ``dtype``."""
        return self.dtype if self.kv_cache_dtype is None else WeightFormat(self.kv_cache_dtype).dtype


def check_width(width: int) -> None:
    """Raise ConfigurationError unless a window of so many rows fits."""
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigurationError(f"a window of {width} rows does not fit; 1 to {MAX_WIDTH} (k + 1) are possible")


def decoder_options(
    *,
    batch_size: int | Sequence[int],
    n_positions: int | Sequence[int] | None,
    context_length_estimate: int | Sequence[int] | None,
    amp: str,
    trained: int,
    layout: Layout = WHOLE,
    quantization: str | None = None,
    kv_cache_dtype: str | None = None,
) -> DecoderOptions:
    """Check and complete the options of `AutoDecoder.from_pretrained`; ``trained`` is the model's own context."""
    if not isinstance(amp, str) or amp not in AMP:
        raise ConfigurationError(f"amp={amp!r} is unknown; use one of {', '.join(AMP)}")
    batches = _ascending("batch_size", batch_size)
    if isinstance(batch_size, int):
        batches = _powers(batch_size, first=1)
    kv_buckets = _ascending("n_positions", trained if n_positions is None else n_positions)
    if kv_buckets[-1] > trained:
        raise ConfigurationError(
            f"n_positions={kv_buckets[-1]} is more than the {trained} positions the model was trained on "
            "(max_position_embeddings); ask for fewer"
        )
    if n_positions is None or isinstance(n_positions, int):
        kv_buckets = _powers(kv_buckets[-1])
    chunks = _ascending(
        "context_length_estimate", [64, 256] if context_length_estimate is None else context_length_estimate
    )
    chunks = tuple(sorted({min(chunk, kv_buckets[-1]) for chunk in chunks}))
    if quantization not in (None, "gguf"):
        WeightFormat.of(quantization)
    caches = [form.value for form in CACHE_FORMATS]
    if kv_cache_dtype is not None and kv_cache_dtype not in caches:
        raise ConfigurationError(
            f"kv_cache_dtype={kv_cache_dtype!r} is unknown; use one of {', '.join(caches)}, or leave it out to "
            "keep keys and values as amp says"
        )
    return DecoderOptions(
        batches[-1], kv_buckets, chunks, amp, layout, quantization, kv_cache_dtype, batch_buckets=batches
    )


def _ascending(name: str, one_or_more: int | Sequence[int]) -> tuple[int, ...]:
    values = tuple(one_or_more) if isinstance(one_or_more, (list, tuple)) else (one_or_more,)
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if not values or len(numbers) < len(values) or numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)):
        raise ConfigurationError(f"{name} must be a positive number or an ascending list of them, not {one_or_more!r}")
    return tuple(numbers)


def _powers(last: int, first: int = 128) -> tuple[int, ...]:
    """The first one, twice, four times as much, ... and the last one itself."""
    buckets = []
    bucket = first
    while bucket < last:
        buckets.append(bucket)
        bucket *= 2
    return (*buckets, last)
