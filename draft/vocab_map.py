"""Maps between the target's ids and a draft's: the same ids, or the tokens that both vocabularies have.

With unequal vocabularies a draft proposes only tokens that the target also has, and reads tokens that it lacks as its
unknown token. This is the vocabulary intersection (TLI) of Timor et al., arXiv 2502.05202. Since a drafted token is
verified like any other, only acceptance depends on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.core import reduce


class VocabMap(nn.Module):
    """The same ids on both sides; those past the end of either are not drafted, or read as the last one."""

    def __init__(self, target_size: int, draft_size: int) -> None:
        super().__init__()
        self._both, self._last = min(target_size, draft_size), draft_size - 1

    @property
    def name(self) -> str:
        """Name that distinguishes the graphs of one map from those of another."""
        return str(self._both)

    @property
    def whole(self) -> bool:
        """Whether every id of the draft is the target's id of the same token, so that `logits` changes nothing."""
        return self._both == self._last + 1

    def known(self, tokens: Tensor) -> Tensor:
        """Ids of the draft for ids of the target; any id for PAD. [...] int32 -> [...] int32"""
        return tokens.clamp(min=0, max=self._last)

    def logits(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids from those over the draft's. [..., V'] -> [..., V]"""
        return logits[..., : self._both]

    def ids(self, tokens: Sequence[int]) -> list[int]:
        if max(tokens, default=0) <= self._last:  # as a rule, and cheaper than a look at each
            return list(tokens)
        return [min(token, self._last) for token in tokens]


class IntersectionVocabMap(VocabMap):
    """Tokens that are in both vocabularies, with equal or different ids.

    target, draft  token -> id of each; ``unknown`` is the draft's id for tokens that it lacks
    """

    index: Tensor

    def __init__(
        self, target: Mapping[str, int], draft: Mapping[str, int], *, sizes: tuple[int, int], unknown: int = 0
    ) -> None:
        super().__init__(*sizes)
        places = [-1] * sizes[0]
        for token, number in target.items():
            draft_id = draft.get(token, -1)
            if number < sizes[0] and draft_id < sizes[1]:
                places[number] = draft_id
        self._unknown, self._places = unknown, places
        self.shared = sum(place >= 0 for place in places)
        self.register_buffer("index", torch.tensor(places, dtype=torch.int32))

    @property
    def whole(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return f"intersection {hashlib.sha256(repr(self._places).encode()).hexdigest()[:12]}"

    def known(self, tokens: Tensor) -> Tensor:
        ids = self.index[tokens.clamp(min=0, max=len(self._places) - 1)]
        return torch.where(ids < 0, self._unknown, ids)

    def logits(self, logits: Tensor) -> Tensor:
        selected = logits.index_select(-1, self.index.clamp(min=0))  # graphs index no other way
        return torch.where(self.index < 0, reduce.NEGATIVE, selected)

    def ids(self, tokens: Sequence[int]) -> list[int]:
        return [self._places[token] if self._places[token] >= 0 else self._unknown for token in tokens]
