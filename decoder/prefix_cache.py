"""Prompts in the cache, so that a request with a shared prefix copies rows and computes only the rest.

A whole prompt is always shared with concurrent requests for it. With prefix caching (``keeps``), prompts stay in their
slots, and prefixes are shared too. Copied rows equal computed rows: the same graphs over the same chunks wrote them, or
kernels whose bits do not depend on the start of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """Result of a prefill: logits [1, 1, V] after the last token, and features [S, F] of ``layers``, if requested."""

    prompt: tuple[int, ...]
    layers: tuple[int, ...] | None
    logits: Tensor
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A shared prefix in a slot. ``read``: the prompt in the slot; ``rows``: the number of equal ids."""

    slot: int
    read: CachedPrompt
    rows: int


class PrefixCache:
    """The prompts in the slots of one cache; a `paceline.engine.engine.CachedPrefixes`.

    step   prefixes are shared in multiples of this number of rows: the longest chunk if the bits of a row depend on its
           graph; else 1
    keeps  whether prompts stay when their requests finish, and prefixes are shared. Otherwise only whole prompts are,
    and
           of those with hidden states only the last one: these are large
    """

    def __init__(self, step: int = 1) -> None:
        self.step, self.keeps = step, False
        self._by_slot: dict[int, CachedPrompt] = {}  # least recently used first
        self._shared: dict[int, int] = {}  # rows that the last prompt of a slot copied

    def find(self, prompt: tuple[int, ...], layers: tuple[int, ...] | None) -> SharedPrefix | None:
        """Return a slot that holds this prompt with the same hidden states, or a prefix of it if prefixes are kept."""
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
        """Record that a prompt of that length is about to be prefilled into a slot, after the rows of ``prefix``."""
        rows = 0 if prefix is None else prefix.rows
        self._shared[slot] = rows
        if prefix is not None and prefix.slot in self._by_slot:
            self._by_slot[prefix.slot] = self._by_slot.pop(prefix.slot)
        held = self._by_slot.get(slot)
        if held is not None and (prefix is None or prefix.slot != slot or rows < length):
            self.forget(slot)

    def add(self, slot: int, read: CachedPrompt) -> None:
        """Record that a slot holds a whole prompt."""
        if read.features is not None and not self.keeps:
            self._by_slot = {other: one for other, one in self._by_slot.items() if one.features is None}
        self._by_slot[slot] = read

    def overwrite(self, slot: int, start: int) -> None:
        """Record that rows of a slot from ``start`` on are about to be overwritten."""
        read = self._by_slot.get(slot)
        if read is not None and start < len(read.prompt):
            self.forget(slot)

    def finish(self, slot: int) -> None:
        """Record that the request has left the slot."""
        if not self.keeps:
            self.forget(slot)

    def move(self, slot: int, to: int) -> None:
        """Record that the request in a slot, with its rows, has moved to a free slot."""
        self._shared[to] = self._shared.pop(slot, 0)
        self.forget(to)
        if slot in self._by_slot:
            self._by_slot[to] = self._by_slot.pop(slot)

    def forget(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def begin(self, *, last: object | None, holder: object | None) -> None:
        """Begin a call. ``last``: the holder whose prompts it reuses; ``holder``: that of the current prompts."""
        if last is None or last is not holder:
            self._by_slot.clear()
        self.keeps = last is not None

    # ---- for the engine

    def choose(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """Return the slot for a prompt: one whose own prompt it continues; else an empty one; else the one with the
        longest prefix, if more of its rows are used than lost; else the least recently used one.
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
        """Return the number of rows of a slot that must not change."""
        read = self._by_slot.get(slot)
        return len(read.prompt) if read is not None and self.keeps else 0

    def shared(self, slot: int) -> int:
        """Return the number of prompt tokens that the request in a slot copied."""
        return self._shared.get(slot, 0)

    def _common(self, read: CachedPrompt, prompt: tuple[int, ...]) -> int:
        """Rows that both share, without the last id of ``prompt``: the token after it must be computed."""
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
