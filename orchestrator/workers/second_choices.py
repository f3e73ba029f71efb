"""Reads rows of a draft model again, for a drafter that works ahead: to repair its cache, or for its second choices.

Both are one pass over a window of the draft's own cache, where a proposal takes a pass for every token. The graphs that
draft are not changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core import probs, reduce
from paceline.core.types import Commit, SamplingTensors
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.vocab_map import VocabMap

_CANDIDATES = 64  # noise for every id of a large vocabulary would take longer than the model


class SecondChoices:
    """A `paceline.placement.lookahead.drafter.SecondChoiceModel` over a draft model.

    ``vocabulary``: maps between the target's ids and the draft's.
    """

    def __init__(self, decoder: CompiledDecoder, vocabulary: VocabMap) -> None:
        self._decoder, self._vocabulary = decoder, vocabulary

    def reread(self, commit: Commit, rows: int) -> None:
        """See the protocol."""
        self._window(commit.tokens, commit.first_row, rows)

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """See the protocol. drafts [B, k] int32.

        Scores are the draft's logits; where a slot samples, over temperature and with the noise of their position,
        which is the target's noise too. Only the most likely tokens are considered, and of the filters only top-k.
        """
        end = commit.first_row + commit.count
        root = commit.tokens.gather(1, (commit.count - 1).to(torch.int64).unsqueeze(1))
        logits = probs.apply_temperature(self._window(torch.cat((root, drafts[:, :-1]), 1), end - 1, rows), sampling)
        first = drafts.clamp(min=0).to(torch.int64).unsqueeze(-1)
        likely, ids = logits.topk(min(_CANDIDATES, logits.shape[-1]))
        top_k = sampling.params[:, 1].view(-1, 1, 1)
        excluded = (ids == first) | ((top_k > 0) & (torch.arange(ids.shape[-1]) >= top_k))
        scores, ids = torch.cat((logits.gather(-1, first), likely), -1), torch.cat((first, ids), -1).to(torch.int32)
        if bool((sampling.params[:, 0] > 0).any()):
            positions = end.unsqueeze(1) + torch.arange(drafts.shape[1], dtype=torch.int32)
            scores = probs.add_gumbel(scores, positions, sampling, ids=ids)
        second = torch.where(excluded, reduce.NEGATIVE, scores[..., 1:]).max(-1)
        gaps = scores[..., 0] - second.values
        return ids[..., 1:].gather(-1, second.indices.unsqueeze(-1)).squeeze(-1).tolist(), gaps.tolist()

    def _window(self, tokens: Tensor, row: Tensor, rows: int) -> Tensor:
        """tokens [B, T] and row [B] of the first one -> logits [B, T, V] over the target's ids."""
        kv_bucket = self._decoder.bucket_for(rows + tokens.shape[1])
        logits, _ = steps.window(self._decoder, self._vocabulary.known(tokens), row, bucket=kv_bucket)
        return self._vocabulary.logits(logits)
