"""One text in the ids of two tokenizers: the target's, which are given, and a draft's, which are made.

Strings and lists of ids only; no model. The target's ids are never encoded anew: what is committed is committed, and
only ids that continue it are of use. The draft's are, since more text may change how its end is divided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from paceline.core.detokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer, plain_text

_CONTEXT = 8
"""Tokens that new text is encoded or decoded behind: how a word is divided depends on what stands before it."""

_TAIL = 64
"""Tokens at the end of a draft's text that are encoded anew in every round, at least; at most, usually, twice that."""


class TargetText:
    """The target's side: what its ids say so far, and which ids may follow."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        cut = max(0, len(prompt) - _CONTEXT)
        for _ in range(3):  # a character has four bytes at most
            cut -= bool(cut) and plain_text(tokenizer, list(prompt[:cut])).endswith(REPLACEMENT)
        head, tail = list(prompt[:cut]), prompt[cut:]
        self._tokenizer, self._growing = tokenizer, IncrementalDetokenizer(tokenizer, head)
        self.text = plain_text(tokenizer, head)
        """All that is certain: it never ends inside a character."""
        self._pieces: deque[tuple[list[int], str]] = deque(maxlen=_CONTEXT)
        self._open: list[int] = []  # of a character that is not complete
        self.extend(tail)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        for token in tokens:
            piece = self._growing.push(token)
            self._open.append(token)
            settled = len(self._open) - self._growing.held
            if settled:
                self._pieces.append((self._open[:settled], piece))
                self.text, self._open = self.text + piece, self._open[settled:]

    def continued(self, text: str) -> list[int] | None:
        """Ids behind those committed that say ``text``, which stands behind what is certain; None: there are none.

        A proposal has to begin where the committed ids end. So the new text is encoded behind some of the old, and the
        ids must begin with those committed; with fewer and fewer of them, since a model may have divided a word as its
        tokenizer never would.
        """
        pieces = list(self._pieces)
        for first in range(len(pieces)):
            known = [*chain(*(ids for ids, _ in pieces[first:])), *self._open]
            made = self._encode("".join(piece for _, piece in pieces[first:]) + text)
            if made[: len(known)] == known:
                return made[len(known) :]
        made = self._encode(text)
        if made[: len(self._open)] != self._open:
            return None
        last = [] if not pieces else pieces[-1][0]
        both = plain_text(self._tokenizer, [*last, *made])
        return made[len(self._open) :] if both == plain_text(self._tokenizer, last) + text else None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class DraftText:
    """The draft's side: a text that only grows, as ids, made anew from a place on before which nothing changes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        first = getattr(tokenizer, "bos_token_id", None)
        self._settled = [] if first is None or tokenizer.encode("")[:1] != [first] else [first]
        self._done = 0  # characters that the settled ids say

    def ids(self, text: str) -> list[int]:
        """The whole text, which begins with the one before."""
        tail = text[self._done :]
        made = self._tokenizer.encode(tail, add_special_tokens=False)
        whole = [*self._settled, *made]
        if len(made) > 2 * _TAIL:
            self._settle(tail, made)
        return whole

    def says(self, ids: list[int], drafts: list[int]) -> str:
        """What drafts behind the ids say, as far as characters are complete."""
        context = ids[-_CONTEXT:]
        before, both = (plain_text(self._tokenizer, part) for part in (context, context + drafts))
        return both[len(before) :].split(REPLACEMENT)[0] if both.startswith(before) else ""

    def _settle(self, tail: str, made: list[int]) -> None:
        """Find a place from which on the text, encoded by itself, gives the same ids."""
        size = len(plain_text(self._tokenizer, made))
        for cut in range(len(made) - _TAIL, len(made) - 2 * _TAIL, -1):
            at = len(tail) - size + len(plain_text(self._tokenizer, made[:cut]))
            if 0 < at < len(tail) and self._tokenizer.encode(tail[at:], add_special_tokens=False) == made[cut:]:
                self._settled += made[:cut]
                self._done += at
                return
