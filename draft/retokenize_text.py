"""One text in the ids of two tokenizers: the target's, which are given, and a draft's, which are derived from it.

Strings and lists of ids only; no model. The target's ids are never encoded anew: what is committed is committed, and
only ids that continue it are of use. The draft's are, since more text may change how its end is divided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from paceline.core.detokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer, plain_text

_CONTEXT = 8
"""Tokens of context to encode or decode new text with: how a word is divided depends on what is before it."""

_TAIL = 64
"""Tokens at the end of a draft's text that are encoded anew in every round, at least; at most, usually, twice that."""


class TargetText:
    """The target's side: the text of its ids so far, and which ids may follow."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        cut = max(0, len(prompt) - _CONTEXT)
        while cut and plain_text(tokenizer, list(prompt[max(0, cut - _CONTEXT) : cut])).endswith(REPLACEMENT):
            cut -= 1  # not inside a character
        head, tail = list(prompt[:cut]), prompt[cut:]
        self._tokenizer, self._detokenizer = tokenizer, IncrementalDetokenizer(tokenizer, head)
        self.text = plain_text(tokenizer, head)
        """All that is certain: it never ends inside a character."""
        self._pieces: deque[tuple[list[int], str]] = deque(maxlen=_CONTEXT)
        self._unfinished: list[int] = []  # ids of a character that is not complete
        self.extend(tail)

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        for token in tokens:
            piece = self._detokenizer.push(token)
            self._unfinished.append(token)
            finished = len(self._unfinished) - self._detokenizer.held
            if finished:
                self._pieces.append((self._unfinished[:finished], piece))
                self.text, self._unfinished = self.text + piece, self._unfinished[finished:]

    def continuation(self, text: str) -> list[int] | None:
        """Ids that continue the committed ones and say ``text``, which follows what is certain; None = there are none.

        A proposal has to begin where the committed ids end. So the new text is encoded together with some of the old,
        and the ids must begin with the committed ones; with less and less of the old text, since a model may have
        divided a word as its tokenizer never would.
        """
        pieces = list(self._pieces)
        for first in range(len(pieces)):
            committed = [*chain(*(ids for ids, _ in pieces[first:])), *self._unfinished]
            ids = self._encode("".join(piece for _, piece in pieces[first:]) + text)
            if ids[: len(committed)] == committed:
                return ids[len(committed) :]
        ids = self._encode(text)
        if ids[: len(self._unfinished)] != self._unfinished:
            return None
        last = [] if not pieces else pieces[-1][0]
        both = plain_text(self._tokenizer, [*last, *ids])
        return ids[len(self._unfinished) :] if both == plain_text(self._tokenizer, last) + text else None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class DraftText:
    """The draft's side: the ids of a text that only grows. They are encoded anew only where they may still change."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        bos = getattr(tokenizer, "bos_token_id", None)
        self._settled = [] if bos is None or tokenizer.encode("")[:1] != [bos] else [bos]
        self._settled_size = 0  # characters of the settled ids

    def ids(self, text: str) -> list[int]:
        """The ids of the whole text, which begins with the one before."""
        tail = text[self._settled_size :]
        tail_ids = self._tokenizer.encode(tail, add_special_tokens=False)
        ids = [*self._settled, *tail_ids]
        if len(tail_ids) > 2 * _TAIL:
            self._settle(tail, tail_ids)
        return ids

    def decode_drafts(self, ids: list[int], drafts: list[int]) -> str:
        """The text of drafts that follow the ids, as far as characters are complete."""
        context = ids[-_CONTEXT:]
        before, both = (plain_text(self._tokenizer, part) for part in (context, context + drafts))
        return both[len(before) :].split(REPLACEMENT)[0] if both.startswith(before) else ""

    def _settle(self, tail: str, tail_ids: list[int]) -> None:
        """Find a place from which on the text, encoded by itself, gives the same ids."""
        size = len(plain_text(self._tokenizer, tail_ids))
        for cut in range(len(tail_ids) - _TAIL, len(tail_ids) - 2 * _TAIL, -1):
            start = len(tail) - size + len(plain_text(self._tokenizer, tail_ids[:cut]))
            if not 0 < start < len(tail):
                continue
            if self._tokenizer.encode(tail[start:], add_special_tokens=False) == tail_ids[cut:]:
                self._settled += tail_ids[:cut]
                self._settled_size += start
                return
