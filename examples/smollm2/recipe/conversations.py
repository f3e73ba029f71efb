"""Conversations for `paceline.heads.features.Conversations`, out of a stream of token ids.

What `paceline train` cuts out of a stream begins anywhere. A drafter at work has always read the whole conversation,
and never drafts what a user says. Not here: making conversations (`answers.py`, `many_answers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.heads.features import Conversation


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids with which a conversation and an answer begin."""

    conversation: list[int]
    answer: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Markers:
        """Ids of the markers in SmolLM2's chat template."""
        return cls(*(tokenizer.encode(text) for text in ("<|im_start|>system\n", "<|im_start|>assistant\n")))


def places(stream: np.ndarray, ids: list[int]) -> np.ndarray:
    """Positions of ``ids`` in a stream [n]."""
    room = len(stream) - len(ids) + 1
    found = np.ones(room, dtype=bool)
    for offset, number in enumerate(ids):
        found &= stream[offset : offset + room] == number
    return np.flatnonzero(found)


def split(stream: np.ndarray, markers: Markers) -> list[Conversation]:
    """Conversations [n] that lie end to end; the answer of each is what follows its first marker."""
    starts = [*places(stream, markers.conversation).tolist(), len(stream)]
    texts = []
    for text in (stream[begin:end] for begin, end in pairwise(starts)):
        answer = np.zeros(len(text), dtype=bool)
        for begin in places(text, markers.answer)[:1]:
            answer[begin + len(markers.answer) :] = True
        texts.append(Conversation(text, answer))
    return texts
