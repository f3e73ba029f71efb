"""Base of every verifier: the target, whose slots it prefills. Not in this module: verification."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import reduce
from paceline.core.errors import SamplingError
from paceline.core.protocols import HostText, Reading, Verifier
from paceline.core.types import (
    Commit,
    FeatureSpec,
    PrefillResult,
    RoundLimits,
    SamplingTensors,
    TokenLogprobs,
    TokenScore,
)
from paceline.decoder.backends.base import Step
from paceline.decoder.decoder import CompiledDecoder, first_slots, for_all_slots, idle_tokens
from paceline.decoder.steps import move_slot, prefill_in_chunks

FindStep = Callable[[int, int, Sequence[Tensor]], Step]
"""Function from a bucket of the cache length, lines as in `GraphKey`, and inputs to a step -> tokens, count (and
features).
"""


@dataclass(frozen=True, slots=True)
class _Found:
    """A selected step, valid until its selection changes. ``rows``: of the longest sequence, before a round."""

    step: Step
    lines: int
    rows: range


class TargetVerifier(Verifier):
    """A verifier over a decoder.

    reads  hidden states that a drafter reads; prompts and commits carry these features
    width  capacity of a commit in tokens
    slots  the sequence of every slot, or None; the list is shared with the engine, which appends commits. () = no
           sequence needs the host
    """

    movable = True

    def __init__(
        self,
        decoder: CompiledDecoder,
        width: int,
        *,
        reads: FeatureSpec | None = None,
        slots: Sequence[HostText | None] = (),
    ) -> None:
        self.decoder, self._width, self._reads, self._slots = decoder, width, reads, slots
        self._kernels, self._found = decoder.body.kernels, dict[Hashable, _Found]()
        self._limit: tuple[list[int], Tensor] = ([], torch.empty(0))  # of the last round

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Prefill a prompt and sample the first token."""
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
        """Do nothing to the cache: the next request's prompt overwrites its rows."""
        self.decoder.read_prompts.finish(slot)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        move_slot(self.decoder, slot, to, rows=rows)

    def _inputs(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> list[Tensor]:
        """Return the inputs that every graph of a round takes first."""
        most, tensor = self._limit
        if limits.max_accept != most:  # a new tensor costs more than the rest of the call
            tensor = torch.tensor(limits.max_accept, dtype=torch.int32)
            self._limit = limits.max_accept, tensor
        return [commit.tokens, commit.count, commit.first_row, tensor, sampling.params, sampling.seeds]

    def _next(
        self, commit: Commit, inputs: Sequence[Tensor], which: Hashable, *, limits: RoundLimits, find: FindStep
    ) -> Commit:
        """Return the next commit, by the step of ``find``, called again when ``which``, bucket or batch rows change."""
        rows, slots = limits.max_rows, limits.used_slots
        found = self._found.get((which, slots))
        if found is None or rows not in found.rows:
            bucket, lines = self.decoder.bucket_for(rows), self.decoder.lines_for(slots)
            step = find(bucket, lines, [first_slots(x, lines) for x in inputs])
            found = self._found[which, slots] = _Found(step, lines, range(rows, bucket + 1))
        lines = found.lines
        tokens, count, *features = found.step(*([first_slots(x, lines) for x in inputs] if lines else inputs))
        if lines:
            slots = len(commit.count)
            tokens, count = for_all_slots(tokens, slots, idle_tokens(self._width)), for_all_slots(count, slots, 1)
            features = [for_all_slots(x, slots) for x in features]
        return Commit(tokens, count, commit.first_row + commit.count, features[0] if features else None)

    def _choose(self, logits: Tensor, position: int, sampling: SamplingTensors) -> int:
        """The token at a position, from its logits [V]."""
        where = torch.tensor([[position]], dtype=torch.int32)
        return int(self._kernels.sample_tokens(logits.view(1, 1, -1), where, sampling))


def processed(text: HostText, ids: list[int], logits: Tensor) -> Tensor:
    """Return the logits [V] that follow ``ids`` after the request's processing."""
    return logits if text.processing is None else text.processing.process(ids, logits)


def scores_of(text: HostText, token: int, *, raw: Tensor, processed: Tensor) -> list[TokenScore]:
    """Return the score of a token, if its request needs scores. raw, processed: [V], the model's logits and the
    processed ones.

    Processed rows without a committed token are not scored: a processor's result after a forbidden draft is unused.

    Raises:
        SamplingError: the processors cut every token, for instance a grammar at a dead end.
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
