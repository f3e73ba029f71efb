"""Reads a draft model's rows again, for a drafter that works ahead: to put them right, or to see its second choices.

A window of the decoder that drafts, over its own cache: one pass, where a proposal takes one for every token. The
drafting graphs are as they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core import probs, reduce
from paceline.core.types import Commit, SamplingTensors
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.draft.vocab_map import VocabMap

_CANDIDATES = 64  # noise for all ids of a large vocabulary takes longer than the model


class SecondChoices:
    """A `paceline.placement.lookahead.drafter.SecondChoiceModel` of a draft model. ``vocabulary``: between the
    target's ids and its own.
    """

    def __init__(self, decoder: CompiledDecoder, vocabulary: VocabMap) -> None:
        self._decoder, self._vocabulary = decoder, vocabulary

    def reread(self, commit: Commit, rows: int) -> None:
        """See the protocol."""
        self._window(commit.tokens, commit.first_row, rows)

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """See the protocol. Scores are the draft's logits; where a slot samples, over temperature and with the noise of
        their position, which is the target's too. Only the likeliest tokens are looked at; of what cuts, only top-k.
        """
        end = commit.first_row + commit.count
        root = commit.tokens.gather(1, (commit.count - 1).to(torch.int64).unsqueeze(1))
        logits = probs.apply_temperature(self._window(torch.cat((root, drafts[:, :-1]), 1), end - 1, rows), sampling)
        first = drafts.clamp(min=0).to(torch.int64).unsqueeze(-1)
        likely, ids = logits.topk(min(_CANDIDATES, logits.shape[-1]))
        top_k = sampling.params[:, 1].view(-1, 1, 1)
        cut = (ids == first) | ((top_k > 0) & (torch.arange(ids.shape[-1]) >= top_k))
        scores, ids = torch.cat((logits.gather(-1, first), likely), -1), torch.cat((first, ids), -1).to(torch.int32)
        if bool((sampling.params[:, 0] > 0).any()):
            places = end.unsqueeze(1) + torch.arange(drafts.shape[1], dtype=torch.int32)
            scores = probs.add_gumbel(scores, places, sampling, ids=ids)
        second = torch.where(cut, reduce.NEGATIVE, scores[..., 1:]).max(-1)
        gaps = scores[..., 0] - second.values
        return ids[..., 1:].gather(-1, second.indices.unsqueeze(-1)).squeeze(-1).tolist(), gaps.tolist()

    def _window(self, tokens: Tensor, row: Tensor, rows: int) -> Tensor:
        """tokens [B, T] and row [B] of the first -> logits [B, T, V] over the target's ids."""
        reach = self._decoder.bucket_for(rows + tokens.shape[1])
        logits, _ = steps.window(self._decoder, self._vocabulary.known(tokens), row, bucket=reach)
        return self._vocabulary.logits(logits)
