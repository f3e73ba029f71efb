"""Conversations to train on: each starts at its beginning, and only the answers enter the loss.

What `paceline train` cuts out of a stream begins anywhere. A drafter at work has always read the whole conversation,
and never drafts what a user says. Not here: making conversations (`answers.py`, `many_answers.py`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.options import TEXTS_PER_FILE

_POOL = 64  # batches among which texts are sorted by length
_STEP = 32  # lengths of batches are multiples of it


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids with which a conversation and an answer begin, and the id that ends an answer."""

    conversation: list[int]
    answer: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> Markers:
        """Ids of the markers in SmolLM2's chat template."""
        first, answer = (tokenizer.encode(text) for text in ("<|im_start|>system\n", "<|im_start|>assistant\n"))
        (end,) = tokenizer.encode("<|im_end|>")
        return cls(first, answer, end)


def places(stream: np.ndarray, ids: list[int]) -> np.ndarray:
    """Positions of ``ids`` in a stream [n]."""
    room = len(stream) - len(ids) + 1
    found = np.ones(room, dtype=bool)
    for offset, number in enumerate(ids):
        found &= stream[offset : offset + room] == number
    return np.flatnonzero(found)


class Conversations:
    """Batches of `TEXTS_PER_FILE` conversations with the target's states, as `FeatureCache` gives those of a stream.

    stream   [n], conversations end to end; ``longest`` tokens of each are read
    measure  [m], conversations to measure on
    length   tokens of a text on average, with what fills the rows
    """

    def __init__(
        self, target: FrozenTarget, stream: np.ndarray, measure: np.ndarray, *, markers: Markers, longest: int
    ) -> None:
        self._target, self._markers, self._longest = target, markers, longest
        self._texts, self._measured = self._split(stream), self._split(measure)
        self.batches = len(self._texts) // TEXTS_PER_FILE
        if not self.batches or not self._measured:
            raise ConfigurationError(
                f"the data hold {len(self._texts)} conversations; give at least {TEXTS_PER_FILE}, and one to measure on"
            )
        self.length = sum(self._size(batch) for batch in self._epoch(0)) / self.batches
        self.key = hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest()[:16]
        self._order: tuple[int, list[list[np.ndarray]]] | None = None

    def batch(self, number: int) -> Texts:
        """Batch ``number``; the order changes after every ``batches`` of them."""
        epoch, index = divmod(number, self.batches)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._epoch(epoch)
        return self.read(self._order[1][index])

    def eval_texts(self) -> Texts:
        """The conversations to measure on."""
        return self.read(self._measured)

    def read(self, texts: list[np.ndarray]) -> Texts:
        """Conversations in rows of one length, with the target's states."""
        tokens, counted = self.rows(texts)
        made = self._target.read(tokens)
        return Texts(made.tokens, made.last, made.streams, counted.to(made.tokens.device))

    def rows(self, texts: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """tokens [n, S] int64, and counted [n, S] bool: the places that predict a token of an answer, or its end."""
        size = self._size(texts)
        tokens = np.full((len(texts), size), self._markers.end, dtype=np.int64)
        counted = np.zeros((len(texts), size), dtype=bool)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            begin = int(places(text, self._markers.answer)[0]) + len(self._markers.answer)
            counted[row, begin - 1 : len(text) - 1] = True
        return torch.from_numpy(tokens), torch.from_numpy(counted)

    def _split(self, stream: np.ndarray) -> list[np.ndarray]:
        starts = [*places(stream, self._markers.conversation).tolist(), len(stream)]
        texts = [stream[begin : min(end, begin + self._longest)] for begin, end in pairwise(starts)]
        return [text for text in texts if len(places(text, self._markers.answer))]

    def _epoch(self, epoch: int) -> list[list[np.ndarray]]:
        rng = np.random.default_rng(epoch)
        order = rng.permutation(len(self._texts))[: self.batches * TEXTS_PER_FILE]
        batches: list[list[np.ndarray]] = []
        for begin in range(0, len(order), _POOL * TEXTS_PER_FILE):
            pool = sorted(order[begin : begin + _POOL * TEXTS_PER_FILE].tolist(), key=lambda i: len(self._texts[i]))
            batches += [
                [self._texts[i] for i in pool[at : at + TEXTS_PER_FILE]] for at in range(0, len(pool), TEXTS_PER_FILE)
            ]
        return [batches[i] for i in rng.permutation(len(batches))]

    def _size(self, texts: list[np.ndarray]) -> int:
        return -(-max(map(len, texts)) // _STEP) * _STEP
