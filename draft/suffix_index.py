"""A suffix automaton that grows by one token at a time (Blumer et al., 1985).

It knows every substring of a text in at most twice as many states as tokens, and finds the longest end of the text
that occurred before, whatever its length: an n-gram index without a largest n. Not a drafter: see `suffix.py`.
"""

from __future__ import annotations

_MAX_LINKS = 32  # followed when ends are brought up to date; longer chains come from texts that repeat one token


class SuffixAutomaton:
    """One growing text. A state stands for all substrings that end at the same places."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]  # index after the last known occurrence that is older than the newest token
        self._last = 0

    def append(self, token: int) -> None:
        """One more token; constant time on average."""
        self._update_ends()
        self.tokens.append(token)
        state = self._state({}, self._length[self._last] + 1, len(self.tokens))
        parent = self._last
        while parent != -1 and token not in self._next[parent]:
            self._next[parent][token] = state
            parent = self._link[parent]
        self._last = state
        if parent == -1:
            self._link[state] = 0
            return
        old = self._next[parent][token]
        if self._length[old] == self._length[parent] + 1:
            self._link[state] = old
            return
        clone = self._state(dict(self._next[old]), self._length[parent] + 1, self._end[old])
        self._link[clone] = self._link[old]
        while parent != -1 and self._next[parent].get(token) == old:
            self._next[parent][token] = clone
            parent = self._link[parent]
        self._link[old] = self._link[state] = clone

    def repeated(self) -> tuple[int, int]:
        """The longest end of the text that occurred before: its length, and where its continuation begins."""
        state = self._link[self._last]
        return (0, 0) if state <= 0 else (self._length[state], self._end[state])

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Append a token to another text, whose last ``length`` tokens ``state`` stands for; begin with (0, 0).

        Returns the state and the length of the longest end, the token included, that this text contains.
        """
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        after = self._next[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def end_of(self, state: int) -> int:
        """Where the continuation of the last known occurrence of this state begins."""
        return self._end[state]

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def _update_ends(self) -> None:
        """Every end of the text so far last occurred here. Called before the text grows, so that it is past."""
        state, steps, end = self._last, 0, len(self.tokens)
        while state > 0 and steps < _MAX_LINKS:
            self._end[state] = end
            state = self._link[state]
            steps += 1
