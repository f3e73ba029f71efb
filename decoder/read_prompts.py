"""Prompts that lie in the cache, so that a request with the same beginning copies rows and computes only the rest.

A whole prompt is always shared with the requests that have it at the same time, such as the outputs of one prompt. With
prefix caching (``keeps``), prompts stay in their slots when their requests leave, and beginnings of prompts are shared
too. What is copied is what would be computed: the same graphs over the same chunks gave it, or kernels whose bits do
not depend on where a chunk begins. Not here: rows of answers, and the copying (`paceline.decoder.steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The beginning of a prompt in a slot. ``read``: the prompt there; ``rows``: how many ids are the same."""

    slot: int
    read: ReadPrompt
    rows: int


class ReadPrompts:
    """The prompts in the slots of one cache; a `paceline.engine.engine.KeptPrompts`.

    step   prefixes are shared in multiples of so many rows: where the bits of a row depend on the graph that read it,
           the longest chunk, so that every chunk is read by the graph that reads it in a whole prompt; else 1
    keeps  whether prompts stay when their requests leave, and beginnings of prompts are shared. Otherwise only whole
           prompts are, and of those with features only the last one: features are large
    """

    def __init__(self, step: int = 1) -> None:
        self.step, self.keeps = step, False
        self._by_slot: dict[int, ReadPrompt] = {}  # the one that was used last comes last
        self._shared: dict[int, int] = {}  # rows that the last prompt of a slot did not read

    def find(self, prompt: tuple[int, ...], layers: tuple[int, ...] | None) -> SharedPrefix | None:
        """A slot that holds this prompt, read for the same features; with prefix caching also one that begins so."""
        best: SharedPrefix | None = None
        for slot, read in self._by_slot.items():
            if read.layers != layers:
                continue
            if read.prompt == prompt:
                return SharedPrefix(slot, read, len(prompt))
            rows = self._common(read, prompt) if self.keeps else 0
            if rows > (0 if best is None else best.rows):
                best = SharedPrefix(slot, read, rows)
        return best

    def take(self, slot: int, prefix: SharedPrefix | None, length: int) -> None:
        """A prompt of that length is about to be read into a slot, behind the rows of ``prefix``."""
        rows = 0 if prefix is None else prefix.rows
        self._shared[slot] = rows
        if prefix is not None and prefix.slot in self._by_slot:
            self._by_slot[prefix.slot] = self._by_slot.pop(prefix.slot)
        held = self._by_slot.get(slot)
        if held is not None and (prefix is None or prefix.slot != slot or rows < length):
            self.forget(slot)

    def add(self, slot: int, read: ReadPrompt) -> None:
        """A slot holds a whole prompt."""
        if read.features is not None and not self.keeps:
            self._by_slot = {other: one for other, one in self._by_slot.items() if one.features is None}
        self._by_slot[slot] = read

    def overwrite(self, slot: int, start: int) -> None:
        """Rows of a slot from ``start`` on are about to be written: what a prompt has there is no more."""
        read = self._by_slot.get(slot)
        if read is not None and start < len(read.prompt):
            self.forget(slot)

    def finish(self, slot: int) -> None:
        """The request has left the slot."""
        if not self.keeps:
            self.forget(slot)

    def move(self, slot: int, to: int) -> None:
        """The request in a slot has gone to a free one, and its rows with it."""
        self._shared[to] = self._shared.pop(slot, 0)
        self.forget(to)
        if slot in self._by_slot:
            self._by_slot[to] = self._by_slot.pop(slot)

    def forget(self, slot: int) -> None:
        """The rows of a slot may hold anything."""
        self._by_slot.pop(slot, None)

    def begin(self, *, last: object | None, holder: object | None) -> None:
        """A call begins. ``last``: with prefix caching, whose prompts it wants; ``holder``: whose are there."""
        if last is None or last is not holder:
            self._by_slot.clear()
        self.keeps = last is not None

    # ---- for the engine

    def choose(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """The slot for a prompt: one whose own prompt it goes on from; else an empty one; else the one that holds most
        of its beginning, if more of what is there is used than lost; else the one that was not used for longest.
        """
        wanted = tuple(prompt)
        there = {slot: self._by_slot[slot] for slot in self._by_slot if slot in free}
        begun = [slot for slot, read in there.items() if read.prompt == wanted[: len(read.prompt)]]
        if begun:
            return max(begun, key=lambda slot: len(there[slot].prompt))
        if len(there) < len(free):
            return next(slot for slot in free if slot not in there)
        best = max(there, key=lambda slot: self._common(there[slot], wanted))
        return best if 2 * self._common(there[best], wanted) >= len(there[best].prompt) else next(iter(there))

    def rows(self, slot: int) -> int:
        """How many rows of a slot must stay as they are."""
        read = self._by_slot.get(slot)
        return len(read.prompt) if read is not None and self.keeps else 0

    def shared(self, slot: int) -> int:
        """How many tokens of its prompt the request in a slot did not read."""
        return self._shared.get(slot, 0)

    def _common(self, read: ReadPrompt, prompt: tuple[int, ...]) -> int:
        """Rows that the two share, of which the last id of ``prompt`` is none: what follows it must be computed."""
        most = min(len(read.prompt), len(prompt) - 1)
        if read.prompt[:most] == prompt[:most]:
            return most - most % self.step
        low, high = 0, most  # the first id that differs is in between
        while high - low > 1:
            middle = (low + high) // 2
            if read.prompt[low:middle] == prompt[low:middle]:
                low = middle
            else:
                high = middle
        return low - low % self.step
