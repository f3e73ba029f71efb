"""Prompts that lie in the cache, so that a further request with the same prompt copies rows and computes nothing.

For several outputs of one prompt. What is copied is what would be computed: the same graphs over the same chunks gave
it. A prompt counts from when it is read until the request that read it leaves its slot, for its rows are not touched in
between. Not here: parts of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """What reading a prompt gave.

    prompt    its ids
    layers    of the features that were asked for; None = no features
    logits    [1, 1, V], after its last token
    features  [S, F], if they were asked for
    """

    prompt: tuple[int, ...]
    layers: tuple[int, ...] | None
    logits: Tensor
    features: Tensor | None


class ReadPrompts:
    """The prompts in the slots of one cache. Of those with features only the last one is kept: features are large."""

    def __init__(self) -> None:
        self._by_slot: dict[int, ReadPrompt] = {}

    def find(self, prompt: tuple[int, ...], layers: tuple[int, ...] | None) -> tuple[int, ReadPrompt] | None:
        """A slot that holds this prompt, read for the same features, and what reading it gave."""
        for slot, read in self._by_slot.items():
            if read.layers == layers and read.prompt == prompt:
                return slot, read
        return None

    def add(self, slot: int, read: ReadPrompt) -> None:
        """A slot holds a whole prompt."""
        if read.features is not None:
            self._by_slot = {other: one for other, one in self._by_slot.items() if one.features is None}
        self._by_slot[slot] = read

    def overwrite(self, slot: int, start: int) -> None:
        """Rows of a slot from ``start`` on are about to be written: a prompt that reaches there is no more."""
        read = self._by_slot.get(slot)
        if read is not None and start < len(read.prompt):
            self.forget(slot)

    def forget(self, slot: int) -> None:
        """The request has left the slot."""
        self._by_slot.pop(slot, None)
