"""Base of every verifier: the target, whose slots it prefills."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core import reduce
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.errors import SamplingError
from paceline.core.protocols import HostText, Reading, Verifier
from paceline.core.types import (
    PAD,
    DraftShape,
    FeatureSpec,
    PrefillResult,
    Proposal,
    SamplingTensors,
    TokenLogprobs,
    TokenScore,
)
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.options import check_width
from paceline.decoder.steps import move_slot, prefill_in_chunks
from paceline.target.steps import pad_draft_probs


class TargetVerifier(Verifier):
    """A verifier over a decoder.

    draft_shape  the largest proposal
    wide         a round without a proposal uses the graph of one with a proposal; otherwise a narrow one
    reads        hidden states that a drafter reads; prompts and commits carry these features
    width        capacity of a commit in tokens, if it alternates with verifiers of deeper draft shapes
    slots        the sequence of every slot, or None; the list is shared with the engine, which appends commits. () = no
                 sequence needs the host
    """

    movable = True

    def __init__(
        self,
        decoder: CompiledDecoder,
        draft_shape: DraftShape,
        *,
        rule: AcceptanceRule,
        wide: bool,
        reads: FeatureSpec | None = None,
        width: int | None = None,
        slots: Sequence[HostText | None] = (),
    ) -> None:
        check_width(draft_shape.num_draft_tokens + 1)
        self.decoder, self.draft_shape, self._rule, self._wide = decoder, draft_shape, rule, wide
        self._reads, self._slots, self._kernels = reads, slots, decoder.body.kernels
        self._width = draft_shape.depth + 1 if width is None else width
        self._most, self._limit = list[int](), torch.empty(0)  # the limits of the last round, and as graphs take them

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        text = self._slots[slot] if self._slots else None
        of_prompt = None if text is None or text.num_prompt_logprobs is None else list[TokenLogprobs]()

        def score(logits: Tensor) -> None:
            assert text is not None and text.num_prompt_logprobs is not None and of_prompt is not None
            begin = len(of_prompt) + 1
            next_tokens = prompt[begin : begin + len(logits)]
            of_prompt.extend(_token_logprobs(logits[: len(next_tokens)], next_tokens, text.num_prompt_logprobs))

        each = None if of_prompt is None else score
        logits, features = yield from prefill_in_chunks(
            self.decoder, slot, prompt, reads=self._reads, shared=True, each=each
        )
        raw = logits[0, 0]
        if text is None:
            return PrefillResult(self._choose(raw, len(prompt), sampling), features)
        try:
            logits = processed(text, text.text, raw)
            token = self._choose(logits, len(prompt), sampling)
            return PrefillResult(token, features, scores_of(text, token, raw=raw, processed=logits), of_prompt)
        except SamplingError as error:
            text.fail(error)
            return PrefillResult(0, features)

    def finish_request(self, slot: int) -> None:
        self.decoder.prefix_cache.finish(slot)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        move_slot(self.decoder, slot, to, rows=rows)

    def _take_limit(self, most: list[int]) -> None:
        """Keep the limits of the rounds that follow: a new tensor costs more than the rest of a call."""
        self._most, self._limit = most, torch.tensor(most, dtype=torch.int32)

    def _choose(self, logits: Tensor, position: int, sampling: SamplingTensors) -> int:
        where = torch.tensor([[position]], dtype=torch.int32)
        return int(self._kernels.sample_tokens(logits.view(1, 1, -1), where, sampling))


def processed(text: HostText, ids: list[int], logits: Tensor) -> Tensor:
    return logits if text.processing is None else text.processing.process(ids, logits)


def scores_of(text: HostText, token: int, *, raw: Tensor, processed: Tensor) -> list[TokenScore]:
    """Return the score of a token, if its request needs scores. raw, processed: [V], the model's logits and the
    processed ones. SamplingError: the processors cut every token, for instance a grammar at a dead end.

    Processed rows without a committed token are not scored: a processor's result after a forbidden draft is unused.
    """
    if text.processing is not None and float(processed.max()) <= reduce.NEGATIVE:
        raise SamplingError(
            f"logits_processor: expected at least one allowed token after {len(text.text)} tokens, got none; let it "
            "allow one, such as the eos id, where a sequence must end"
        )
    logprobs = None
    if text.num_logprobs is not None:
        (logprobs,) = _token_logprobs(raw.unsqueeze(0), [token], text.num_logprobs)
    elif not text.output_scores:
        return []
    return [TokenScore(float(processed.log_softmax(-1)[token]), logprobs)]


def _token_logprobs(raw: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens in the model's logits before each. raw [n, V]"""
    of_model = raw.log_softmax(-1)
    own = of_model.gather(1, torch.tensor(tokens, dtype=torch.int64).unsqueeze(1))
    ranks = ((of_model > own).sum(1) + 1).tolist()
    top = of_model.topk(min(num_top, raw.shape[1]), 1)
    rows = zip(tokens, own[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in rows
    ]


def fitted(proposal: Proposal, nodes: int) -> Proposal:
    """Pad a chain with PAD to the number of nodes that the graph takes."""
    missing, drawn = nodes - proposal.tokens.shape[1], proposal.draft_probs
    if not missing:
        return proposal
    tokens = nn.functional.pad(proposal.tokens, (0, missing), value=PAD)
    return Proposal(tokens, None, None if drawn is None else pad_draft_probs(drawn, missing))
