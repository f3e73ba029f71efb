"""Contents of a decoder's slots as a cache of `transformers`: row b of a batch is slot b.

Padding is not stored. A row's real tokens are consecutive in its slot, so that their positions are the ones that
`transformers` derives from an attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from paceline.core.errors import ConfigurationError, ContextError, DecoderBusyError, PromptError
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.options import MAX_WIDTH


class SlotCache(Cache):
    """Sequences in a decoder's slots, for one loop of `transformers`.

    mask  [R, columns] bool: which tokens of the sequences are real; the others are padding
    """

    def __init__(self, decoder: CompiledDecoder) -> None:
        super().__init__(layers=[])
        self.decoder = decoder
        self.mask = torch.zeros(0, 0, dtype=torch.bool)
        self._saved: list[Tensor] | None = None

    @classmethod
    def after(cls, decoder: CompiledDecoder, real: Tensor) -> SlotCache:
        """Contents of the slots after a generation that no other has followed. real [R, columns] bool"""
        cache = cls(decoder)
        with decoder.held_by(cache):
            cache.mask = real
        return cache

    def __deepcopy__(self, memo: dict[int, object]) -> SlotCache:
        """Return a copy of the sequences that stays valid while the decoder reads others: using either restores its
        rows.

        Raises:
            ConfigurationError: the slots' contents are not in this process's memory.
            DecoderBusyError: another generation has used the slots since.
        """
        if self._saved is None:
            self._check_owner()
            if not self.decoder.on_host:
                raise ConfigurationError(
                    "past_key_values: a cache on a device or sharded over ranks cannot be copied; use one "
                    "generation per decoder"
                )
            rows = int(self.mask.sum(1).max()) if len(self.mask) else 0
            held = (one for layer in self.decoder.body.caches for one in layer)
            self._saved = [one[: len(self.mask), :, :rows].clone() for one in held]
        copied = SlotCache(self.decoder)
        copied.mask, copied._saved = self.mask.clone(), self._saved
        return copied

    # ---- interface of a transformers cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return self.mask.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.decoder.n_positions

    @property
    def batch_size(self) -> int:
        return len(self.mask)

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    def reset(self) -> None:
        self.mask = torch.zeros(0, 0, dtype=torch.bool)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns. A positive number, as older `transformers` had it, is a
        ConfigurationError.
        """
        if tokens_to_remove > 0:
            raise ConfigurationError(
                "crop: expected 0 or a negative number (tokens to remove from the end), got a positive one; correct it"
            )
        self.mask = self.mask[:, : max(0, self.mask.shape[1] + tokens_to_remove)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row b from what row ``beam_idx[b]`` holds. beam_idx [R] int64"""
        if len(beam_idx) != len(self.mask):
            raise ConfigurationError(
                f"beam_idx: expected {len(self.mask)} rows, as in the cache, got {len(beam_idx)}; correct it"
            )
        self._move(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order. indices [R'] int64, or [R] bool"""
        self._move((indices.nonzero().flatten() if indices.dtype == torch.bool else indices).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, each copy next to its original."""
        self._move([row for row in range(len(self.mask)) for _ in range(repeats)])

    def _move(self, source: Sequence[int]) -> None:
        self._check_rows(len(source))
        self._check_owner()
        lengths = self.mask.sum(1)
        self.mask = self.mask[list(source)]
        if list(source) != list(range(len(source))):
            self._saved = None
            with self.decoder.held_by(self):
                self._reorder(source, int(lengths.max()))

    # ---- reading

    @torch.no_grad()
    def read(self, tokens: Tensor, real: Tensor, keep: int) -> Tensor:
        """Append columns and prefill their real tokens.

        tokens [R, T] int64, real [R, T] bool -> logits [R, keep, V] float32 of the last columns; 0 for padding

        Raises:
            PromptError: the decoder has fewer slots than rows, or an id is outside the vocabulary.
            ContextError: a sequence is longer than the decoder's positions.
            DecoderBusyError: another generation has used the slots since, or is using them.
        """
        before = self.mask.sum(1) if len(self.mask) else torch.zeros(len(tokens), dtype=torch.int64)
        self._check(tokens, real, before)
        rows = [row[mask].tolist() for row, mask in zip(tokens, real, strict=True)]
        self._saved = None
        with self.decoder.held_by(self):
            if keep == 1 and bool(real[:, -1].all()) and tokens.shape[1] > 1:
                logits = self._read_prompts(rows, before.tolist())
            else:
                logits = self._read_windows(rows, before.tolist(), real[:, tokens.shape[1] - keep :])
        self.mask = torch.cat((self.mask if len(self.mask) else real[:, :0], real), 1)
        return logits

    def _check(self, tokens: Tensor, real: Tensor, before: Tensor) -> None:
        self._check_rows(len(tokens))
        if len(self.mask):
            self._check_owner()
            if len(tokens) != len(self.mask):
                raise PromptError(
                    f"input_ids: expected {len(self.mask)} rows, as in the cache, got {len(tokens)}; correct it"
                )
        if bool(((before > 0) & ~real.any(1)).any()):
            raise PromptError(
                "input_ids: expected a real token in every row that has a sequence, got only padding in one; add a "
                "token"
            )
        vocabulary = self.decoder.config.vocab_size
        used = tokens[real]
        if len(used) and not 0 <= int(used.min()) <= int(used.max()) < vocabulary:
            raise PromptError(
                f"input_ids: expected ids from 0 to {vocabulary - 1}, this model's vocabulary, got others; use the "
                "model's own tokenizer"
            )
        longest = int((before + real.sum(1)).max())
        if longest > self.decoder.n_positions:
            raise ContextError(
                f"input_ids: expected at most {self.decoder.n_positions} positions, got {longest}; shorten the "
                "prompt, lower max_new_tokens, or load the decoder with more n_positions"
            )

    def _check_rows(self, rows: int) -> None:
        slots = self.decoder.batch_size
        if rows > slots:
            raise PromptError(
                f"batch_size: expected {rows} slots for {rows} rows (prompts x num_beams or num_return_sequences), "
                f"got {slots}; load the decoder with batch_size={rows}, or use fewer rows"
            )

    def _check_owner(self) -> None:
        if self.decoder.last_holder is self:
            return
        if self._saved is None:
            raise DecoderBusyError(
                "past_key_values: another generation has used this decoder since, so its slots no longer hold this "
                "cache; start again without it, or load a second decoder"
            )
        with self.decoder.held_by(self):
            held = (one for layer in self.decoder.body.caches for one in layer)
            for one, saved in zip(held, self._saved, strict=True):
                one[: saved.shape[0], :, : saved.shape[2]] = saved

    def _read_prompts(self, rows: list[list[int]], before: list[int]) -> Tensor:
        """Logits after the last token of every row, [R, 1, V]. A shared prefix of several rows is prefilled once."""
        if any(before):
            logits = [steps.prefill(self.decoder, i, row, start=before[i])[0] for i, row in enumerate(rows)]
            return torch.cat(logits)
        first: dict[tuple[int, ...], int] = {}
        source = [first.setdefault(tuple(row), index) for index, row in enumerate(rows)]
        logits_of = {index: steps.prefill(self.decoder, index, rows[index])[0].clone() for index in first.values()}
        if len(first) < len(rows):
            self._reorder(source, max(map(len, rows)))
        return torch.cat([logits_of[index] for index in source])

    def _read_windows(self, rows: list[list[int]], before: list[int], columns: Tensor) -> Tensor:
        """Logits of the last columns, where ``columns`` [R, keep] bool says they are real. -> [R, keep, V]"""
        decoder, longest = self.decoder, max(map(len, rows))
        row_logits: list[list[Tensor]] = [[] for _ in rows]
        for offset in range(0, longest, MAX_WIDTH):
            width = 1 << (min(longest - offset, MAX_WIDTH) - 1).bit_length()
            tokens = torch.zeros(decoder.batch_size, width, dtype=torch.int32)
            row = torch.zeros(decoder.batch_size, dtype=torch.int32)
            for index, ids in enumerate(rows):
                # A finished row reads its last token again, so that none of its cache rows is overwritten.
                begin = min(offset, max(0, len(ids) - 1))
                part = ids[begin : begin + width]
                tokens[index, : len(part)] = torch.tensor(part, dtype=torch.int32)
                row[index] = before[index] + begin if ids else before[index]
            bucket = decoder.bucket_for(int(row.max()) + width)
            logits = steps.window(decoder, tokens, row, bucket=bucket)[0]
            for index, ids in enumerate(rows):
                row_logits[index] += logits[index, : max(0, len(ids) - offset)].unbind()
        result = torch.zeros(*columns.shape, decoder.config.vocab_size)
        for index, states in enumerate(row_logits):
            count = int(columns[index].sum())
            if count:
                result[index, columns[index]] = torch.stack(states[-count:])
        return result

    def _reorder(self, source: Sequence[int], rows: int) -> None:
        slots = [*source, *range(len(source), self.decoder.batch_size)]
        steps.reorder_slots(self.decoder, torch.tensor(slots, dtype=torch.int32), rows=rows)
