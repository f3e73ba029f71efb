"""Logits processing of one request, in the order of vLLM: bias, Hugging Face processors, penalties, then the mask of
tokens that may follow. The result is a function of the sequence so far, so that callers can follow a draft and return.

`paceline.core.probs` samples tokens from the logits, called by `paceline.target.host_verifier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core import reduce
from paceline.core.errors import SamplingError
from paceline.core.protocols import Processor

if TYPE_CHECKING:
    from paceline.engine.request import LogitsRules
    from paceline.text.structured_output import GrammarState

_FORCED = 1e15
"""Substitute for a score of infinity: above any logit, and finite when divided by the minimum temperature."""


class RowProcessing:
    """The rules of one request, and the state of its grammar. A `paceline.core.protocols.TextProcessing`."""

    def __init__(self, rules: LogitsRules, prompt_length: int) -> None:
        self._rules, self._prompt = rules, prompt_length
        self._grammar: GrammarState | None = None if rules.grammar is None else rules.grammar.state()
        self._bias: tuple[Tensor, Tensor] | None = None
        if rules.logit_bias:
            self._bias = (torch.tensor([*rules.logit_bias]), torch.tensor([*rules.logit_bias.values()]).float())
        self._eos = torch.tensor(sorted(rules.eos), dtype=torch.int64)

    def process(self, ids: list[int], logits: Tensor) -> Tensor:
        rules, output = self._rules, ids[self._prompt :]
        logits = logits.clone()  # processors may write into their input
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        if rules.processor is not None:
            logits = _processed(rules.processor, ids, logits)
        if output and (rules.presence_penalty or rules.frequency_penalty):
            tokens, counts = torch.tensor(output).unique(return_counts=True)
            logits[tokens] -= rules.presence_penalty + rules.frequency_penalty * counts
        logits = logits.clamp(min=reduce.NEGATIVE, max=_FORCED)
        allowed = self.allowed(ids, len(logits))
        return logits if allowed is None else logits.masked_fill(~allowed, reduce.NEGATIVE)

    def allowed(self, ids: list[int], size: int) -> Tensor | None:
        rules, output = self._rules, ids[self._prompt :]
        early = len(output) < rules.min_tokens and len(self._eos) > 0
        if self._grammar is None:
            if not early:
                return None
            mask = torch.ones(size, dtype=torch.bool)
        else:
            mask = self._grammar.allowed(output)
        if early:
            later = mask.index_fill(0, self._eos, False)
            mask = later if self._grammar is None or bool(later.any()) else mask
        return mask

    def continued(self, ids: list[int], draft: Sequence[int], limit: int) -> list[int]:
        draft = list(draft[:limit])
        if self._grammar is None:
            return draft
        output = ids[self._prompt :]
        draft = draft[: self._grammar.accepts(output, draft)]
        if len(draft) < limit and not (draft and draft[-1] in self._rules.eos):
            draft += self._grammar.forced([*output, *draft], limit - len(draft))
        return draft


def _processed(processor: Processor, ids: list[int], logits: Tensor) -> Tensor:
    scores: object = processor(torch.tensor([ids]), logits.unsqueeze(0))
    if not isinstance(scores, Tensor) or scores.shape != (1, len(logits)):
        kind = f"a tensor of shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise SamplingError(
            f"logits_processor: expected scores [1, {len(logits)}], got {kind}; correct what it returns"
        )
    if bool(scores.isnan().any()):
        raise SamplingError(
            f"logits_processor: expected scores, got NaN after {len(ids)} tokens; correct what it returns"
        )
    return scores[0].float()
