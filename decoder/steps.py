"""Steps that need only a decoder: prefill, and the logits of a window."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.protocols import finish
from paceline.core.types import FeatureSpec
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache, first_rows, for_all_slots
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.cache_rows import store
from paceline.decoder.kernels.protocol import CachePosition, Tree
from paceline.decoder.prefix_cache import CachedPrompt, SharedPrefix


class PrefillStep(nn.Module):
    """Prefill a chunk of a prompt into one slot. ``every``: give the logits of all its tokens."""

    def __init__(
        self, body: ModelWithCache, bucket: int, reads: FeatureSpec | None = None, *, every: bool = False
    ) -> None:
        super().__init__()
        self.body, self._bucket, self._reads, self._every = body, bucket, reads, every

    def forward(self, tokens: Tensor, row: Tensor, count: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
        """tokens [1, chunk], row, count, slot [1] int32 -> logits [1, 1 or chunk, V], and any hidden states"""
        hidden, features = self.body(tokens, CachePosition(row, count, slot, self._bucket, padded=True), self._reads)
        if not self._every:
            last = (count - 1).to(torch.int64).view(1, 1, 1).expand(1, 1, hidden.shape[-1])
            hidden = hidden.gather(1, last)
        logits = self.body.logits(hidden)
        return (logits,) if features is None else (logits, features)


class WindowStep(nn.Module):
    """Logits of a window in every slot."""

    def __init__(self, body: ModelWithCache, bucket: int, reads: FeatureSpec | None = None) -> None:
        super().__init__()
        self.body, self._bucket, self._reads = body, bucket, reads

    def forward(self, tokens: Tensor, row: Tensor, *parents: Tensor) -> tuple[Tensor, ...]:
        """tokens [B, T], row [B] and a tree's parents [B, T] int32 -> logits [B, T, V], and any hidden states"""
        tree = Tree.of(*parents) if parents else None
        hidden, features = self.body.window(tokens, row, self._bucket, tree=tree, reads=self._reads)
        logits = self.body.logits(hidden)
        return (logits,) if features is None else (logits, features)


class CompactPathStep(nn.Module):
    """Make an accepted path of a tree consecutive in the cache."""

    def __init__(self, body: ModelWithCache, _bucket: int) -> None:
        super().__init__()
        self.body = body

    def forward(self, row: Tensor, path: Tensor) -> tuple[Tensor]:
        """row [B] int32 of the root, path [B, D] int32 -> row; see `ModelWithCache.compact_path`."""
        self.body.compact_path(row, path)
        return (row + 0,)


class ReorderSlotsStep(nn.Module):
    """Give every slot the contents of another: beam search keeps some beams and drops others after every token."""

    def __init__(self, body: ModelWithCache, bucket: int) -> None:
        super().__init__()
        self.body, self._bucket = body, bucket

    def forward(self, source: Tensor) -> tuple[Tensor]:
        """source [B] int32 -> source. Slot b then holds what slot source[b] held, in the first rows of the bucket."""
        slots = source.to(torch.int64)
        for layer in self.body.caches:
            for cache in layer:
                rows = cache[:, :, : self._bucket]
                rows.copy_(rows.index_select(0, slots))
        return (source + 0,)


class MoveSlotStep(nn.Module):
    """Give a slot the contents of another, in the first rows of the bucket."""

    def __init__(self, body: ModelWithCache, bucket: int) -> None:
        super().__init__()
        self.body, self._bucket = body, bucket

    def forward(self, slot: Tensor, to: Tensor) -> tuple[Tensor]:
        """slot, to [1] int32 -> to"""
        move_rows(self.body.caches, slot, to, count=self._bucket)
        return (to + 0,)


def move_rows(layers: Sequence[tuple[Tensor, Tensor]], slot: Tensor, to: Tensor, *, count: int) -> None:
    """Copy the first ``count`` rows of ``slot`` to slot ``to``, in a graph. slot, to [1] int32"""
    rows = torch.arange(count, dtype=torch.int32, device=slot.device).unsqueeze(0)
    for layer in layers:
        for cache in layer:
            store(cache, cache[:, :, :count].index_select(0, slot), slots=to, rows=rows)


def prefill(
    decoder: CompiledDecoder,
    slot: int,
    prompt: Sequence[int],
    *,
    start: int = 0,
    reads: FeatureSpec | None = None,
    chunks: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Prefill without pauses; otherwise as `prefill_in_chunks`."""
    return finish(prefill_in_chunks(decoder, slot, prompt, start=start, reads=reads, chunks=chunks))


def prefill_in_chunks(
    decoder: CompiledDecoder,
    slot: int,
    prompt: Sequence[int],
    *,
    start: int = 0,
    reads: FeatureSpec | None = None,
    chunks: Sequence[int] | None = None,
    shared: bool = False,
    each: Callable[[Tensor], None] | None = None,
) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
    """Prefill tokens into a slot from cache row ``start`` on, in chunks of the decoder's lengths, or of ``chunks``,
    ascending.

    Yields after every chunk but the last; the slot must not be used until then. ``shared``: the tokens are a whole
    prompt, whose prefix in another slot is copied (`paceline.decoder.prefix_cache`). Its rows are not overwritten while
    its request is in the slot, and the caller calls `PrefixCache.finish` when the request leaves. ``each``: receives
    the logits [n, V] after every token of each chunk; then no prefix is copied. -> logits [1, 1, V] after the last
    token, and the hidden states [S, F] of all tokens if they are read.
    """
    done, logits, features = 0, None, list[Tensor]()
    chunks = decoder.options.chunks if chunks is None else chunks
    layers = None if reads is None else reads.layers
    known = decoder.prefix_cache
    shared = shared and (decoder.on_host or known.keeps)
    if shared:
        prefix = known.find(tuple(prompt), layers) if each is None else None
        known.take(slot, prefix, len(prompt))
        if prefix is not None:
            _copy_rows(decoder, slot, prefix)
            if prefix.rows == len(prompt):
                known.add(slot, prefix.read)
                return prefix.read.logits, prefix.read.features
            done = prefix.rows
            features += [] if prefix.read.features is None else [prefix.read.features[:done]]
    else:
        known.overwrite(slot, start)
    while done < len(prompt):
        left = len(prompt) - done
        chunk = next((c for c in chunks if c >= left), chunks[-1])
        part = list(prompt[done : done + chunk])
        tokens = torch.tensor([part + [0] * (chunk - len(part))], dtype=torch.int32)
        numbers = [torch.tensor([n], dtype=torch.int32) for n in (start + done, len(part), slot)]
        bucket, variant = decoder.bucket_for(start + done + chunk), "" if each is None else "scores"
        key = GraphKey("prefill", chunk, bucket, features=layers, variant=variant)
        step = decoder.graph(key, partial(PrefillStep, reads=reads, every=each is not None), (tokens, *numbers))
        logits, *more = step(tokens, *numbers)
        if each is not None:
            each(logits[0, : len(part)])
            logits = logits[:, len(part) - 1 : len(part)]
        features += [one[0, : len(part)] for one in more]
        done += len(part)
        if done < len(prompt):
            yield
    assert logits is not None, "an empty prompt is refused before this"
    every = torch.cat(features) if features else None
    if shared and each is None:
        known.add(slot, CachedPrompt(tuple(prompt), layers, logits, every))
    return logits, every


def _copy_rows(decoder: CompiledDecoder, slot: int, prefix: SharedPrefix) -> None:
    if prefix.slot == slot:
        return
    if decoder.on_host:
        decoder.body.copy_prompt(slot, prefix.slot, prefix.rows)
        return
    source = torch.arange(decoder.batch_size, dtype=torch.int32)
    source[slot] = prefix.slot
    reorder_slots(decoder, source, rows=prefix.rows)


def window(
    decoder: CompiledDecoder,
    tokens: Tensor,
    row: Tensor,
    *,
    bucket: int,
    parents: Tensor | None = None,
    reads: FeatureSpec | None = None,
    used_slots: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return logits and hidden states of a window. tokens [B, T] int32, row [B] int32, parents [B, T] of a tree;
    ``used_slots``: see `paceline.core.types.RoundLimits` -> [B, T, V] float32 and [B, T, F] or None; zeros in skipped
    slots.
    """
    batch, slots = decoder.batch_for(used_slots), len(row)
    inputs = [first_rows(x, batch) for x in ((tokens, row) if parents is None else (tokens, row, parents))]
    layers, variant = None if reads is None else reads.layers, "" if parents is None else "tree"
    key = GraphKey("window", tokens.shape[1], bucket, features=layers, batch=batch, variant=variant)
    out = [for_all_slots(x, slots) for x in decoder.graph(key, partial(WindowStep, reads=reads), inputs)(*inputs)]
    return out[0], out[1] if reads is not None else None


def compact_path(decoder: CompiledDecoder, row: Tensor, path: Tensor, *, used_slots: int | None = None) -> None:
    """Make an accepted path consecutive in the cache. row [B] int32, path [B, D] int32"""
    batch = decoder.batch_for(used_slots)
    row, path = first_rows(row, batch), first_rows(path, batch)
    key = GraphKey("compact", path.shape[1], decoder.kv_buckets[-1], batch=batch)
    decoder.graph(key, CompactPathStep, (row, path))(row, path)


def reorder_slots(decoder: CompiledDecoder, source: Tensor, *, rows: int) -> None:
    """Give every slot the first ``rows`` cache rows of another one. source [B] int32."""
    key = GraphKey("reorder", bucket=decoder.bucket_for(rows))
    decoder.graph(key, ReorderSlotsStep, (source,))(source)


def move_slot(decoder: CompiledDecoder, slot: int, to: int, *, rows: int) -> None:
    """Give slot ``to`` the first ``rows`` cache rows of ``slot``, and its recorded prompt."""
    if decoder.on_host:
        decoder.body.copy_prompt(to, slot, rows)
    else:
        key, inputs = GraphKey("move", bucket=decoder.bucket_for(rows)), slot_numbers(slot, to)
        decoder.graph(key, MoveSlotStep, inputs)(*inputs)
    decoder.prefix_cache.move(slot, to)


def slot_numbers(*slots: int) -> list[Tensor]:
    """Return each number as a separate tensor, [1] int32."""
    return [torch.tensor([slot], dtype=torch.int32) for slot in slots]
