"""How many requests each API key has, in this process and in others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256


class KeyCounts:
    """Requests that are answered or wait, by key. Keys are hashed: they are told to other processes.

    elsewhere  those of the other processes of the service, as they last said; who limits keys lets in a few more while
               what they say is on its way
    """

    def __init__(self) -> None:
        self.elsewhere: Mapping[str, int] = {}
        self._own: Counter[str] = Counter()

    def own(self) -> Mapping[str, int]:
        """Of this process, by hash."""
        return dict(self._own)

    def total(self, key: str) -> int:
        """Of a key, everywhere."""
        hashed = _hash(key)
        return self._own[hashed] + self.elsewhere.get(hashed, 0)

    @contextmanager
    def one_more(self, key: str) -> Iterator[None]:
        """A request of a key, until the end of its answer."""
        hashed = _hash(key)
        self._own[hashed] += 1
        try:
            yield
        finally:
            self._own[hashed] -= 1
            if not self._own[hashed]:
                del self._own[hashed]


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()
