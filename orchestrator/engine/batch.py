"""Slots and the sequences in them. Requests join and leave between rounds; shapes never change.

It holds the only lengths on the host, all derived from commits. It does not depend on a model or a drafter.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.errors import RequestError, SamplingError
from paceline.core.protocols import Reading, TextProcessing
from paceline.core.sampling import IDLE_ROW, sampling_tensors, widest
from paceline.core.types import (
    IDLE,
    PAD,
    Commit,
    PrefillResult,
    RoundLimits,
    RoundResult,
    SamplingKind,
    SamplingTensors,
    TokenScore,
)
from paceline.engine.request import Request
from paceline.engine.sampling_params import Criterion
from paceline.outputs import FinishReason, RequestOutput, Statistics
from paceline.text.row_processing import RowProcessing
from paceline.text.stop_strings import StopStringFilter


@dataclass(frozen=True, slots=True)
class RoundShape:
    """Properties of the rounds that a batch needs.

    max_accept     maximum number of proposed tokens that a round can accept
    width          maximum number of tokens that a round commits: W of its commits
    max_positions  positions that the drafter can follow; None = all
    kv_buckets     lengths of the target's cache, ascending; the rows of a round never cross the end of a bucket
    batch_buckets  possible numbers of slots of a round, ascending: the first ones; () = always all
    chunk          tokens of the target's longest chunk of a prompt; 0: no prompts are read together
    """

    max_accept: int
    width: int
    max_positions: int | None = None
    kv_buckets: tuple[int, ...] = ()
    batch_buckets: tuple[int, ...] = ()
    chunk: int = 0


MAX_CONSECUTIVE_ROUNDS = 32
"""Rounds between two checks of the queue: a request that arrives during them waits."""

_IDLE_PARAMS = torch.tensor(IDLE_ROW)


class Slot:
    """A request that is being served, and its sequence. A `paceline.core.protocols.HostText`.

    Every token is checked, in order, so that the earliest reason to stop wins.

    text      prompt and all tokens so far
    checks_each_token  whether every single token must be checked to find the stop
    sampling  its sampling values
    kind      its sampling mode; None: its prompt is in prefill, and it takes no part in rounds yet
    depth     maximum number of nodes that a round may accept for it
    left      nodes that it could accept in a round of sufficient depth
    """

    def __init__(self, request: Request) -> None:
        self.request, self.text, self.prompt_length = request, list(request.prompt), len(request.prompt)
        self._filter: StopStringFilter | None = None
        if request.stop_strings is not None and request.tokenizer is not None:
            self._filter = StopStringFilter(request.stop_strings, request.tokenizer, request.prompt)
        self.checks_each_token = self._filter is not None or bool(request.criteria)
        self._appended = 0  # tokens added by `append` since the last `extend`, and the stop reason among them
        self._reason: FinishReason | None = None
        self.num_logprobs, self.num_prompt_logprobs = request.num_logprobs, request.num_prompt_logprobs
        self.output_scores = request.output_scores
        self.prediction: Sequence[int] = request.prediction
        self.processing: TextProcessing | None = None
        if request.rules is not None:
            self.processing = RowProcessing(request.rules, self.prompt_length)
        self.sampling = sampling_tensors([request.sampling])
        self.error: RequestError | None = None
        self.kind: SamplingKind | None = None
        self.depth = self.left = 0

    @property
    def remaining(self) -> int:
        return self.request.max_length - len(self.text)

    def append(self, token: int) -> FinishReason | None:
        """Add a token; return the reason if the sequence stops with it.

        A verifier that decides a round token by token calls this for each; `extend` then receives the same tokens.
        """
        self.text.append(token)
        self._appended += 1
        self._reason = reason = self._reason_to_end(token)
        return reason

    def extend(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Add the tokens of a commit, up to the one that stops the sequence.

        -> number of tokens that were appended, and the reason if it stops.
        """
        request = self.request
        if self._appended:
            count = self.take_appended()
            assert self.text[-count:] == list(tokens[:count]), "another text was checked than was committed"
            return count, self._reason
        if (
            not self.checks_each_token
            and len(self.text) + len(tokens) < request.max_length
            and request.eos.isdisjoint(tokens)
        ):
            self.text += tokens
            return len(tokens), None
        for count, token in enumerate(tokens, start=1):
            self.text.append(token)
            reason = self._reason_to_end(token)
            if reason is not None:
                return count, reason
        return len(tokens), None

    def take_appended(self) -> int:
        count, self._appended = self._appended, 0
        return count

    def _reason_to_end(self, token: int) -> FinishReason | None:
        request = self.request
        if token in request.eos:
            return "stop"
        if self._filter is not None:
            self._filter.push(token)
            if self._filter.finished:
                return "stop"
        reason = _stopped_by(request.criteria, self.text) if request.criteria else None
        return "length" if reason is None and len(self.text) >= request.max_length else reason

    def fail(self, error: RequestError) -> None:
        self.error = error


def _stopped_by(criteria: Sequence[Criterion], text: Sequence[int]) -> FinishReason | None:
    """Return why a text stops by the first of Hugging Face's criteria that says so; None = none does. They are called
    once for every committed token with the growing prefix, as plain decoding would call them.
    """
    ids = torch.tensor([text])
    for criterion in criteria:
        try:
            verdict = criterion(ids, None)
        except (TypeError, AttributeError) as error:
            if "NoneType" not in str(error):
                raise
            name = getattr(criterion, "__qualname__", type(criterion).__name__)
            raise SamplingError(
                f"stopping_criteria_list: {name} reads scores, which criteria do not receive (None, as in `generate` "
                "without output_scores); use criteria that read only the ids",
                param="stopping_criteria_list",
            ) from error
        if bool(verdict.all()) if isinstance(verdict, torch.Tensor) else bool(verdict):
            return _reason_of(criterion)
    return None


def _reason_of(criterion: Criterion) -> FinishReason:
    """Hugging Face's own criteria for length and time are named as such."""
    from transformers.generation import stopping_criteria as hf  # slow to import, and seldom needed

    if isinstance(criterion, hf.MaxTimeCriteria):
        return "time"
    if isinstance(criterion, hf.MaxLengthCriteria):
        return "length"
    if isinstance(criterion, (hf.StopStringCriteria, hf.EosTokenCriteria)):
        return "stop"
    return "criteria"


class Batch:
    """Commit, sampling and limits of all slots, and the sequences in them.

    The mode of ``sampling`` is the widest of the requests that take part in rounds.
    ``slots`` holds the request of every slot or None; the list is shared with verifiers that decide on the host.
    ``reading``: a slot whose prompt is in prefill, and the prefill.
    ``freed`` lists slots whose request has left; the caller that reports them to the rounds removes them.
    """

    def __init__(self, slots: list[Slot | None], shape: RoundShape, statistics: Statistics) -> None:
        size = len(slots)
        slots[:] = [None] * size
        self.slots, self._shape, self._statistics = slots, shape, statistics
        self.reading: tuple[int, Reading] | None = None
        self.freed: list[int] = []
        self.active: list[int] = []  # slots whose requests take part in rounds, ascending; changes in place
        self.sampling = SamplingTensors(
            torch.tensor([IDLE_ROW] * size), torch.zeros(size, 4, dtype=torch.int32), "greedy"
        )
        tokens = torch.full((size, shape.width), PAD, dtype=torch.int32)
        tokens[:, 0] = 0
        zeros = torch.zeros(size, dtype=torch.int32)
        self.commit = Commit(tokens, torch.ones_like(zeros), zeros)
        self._first_idle: Callable[[int], int] = lambda _slot: 0  # row at which an idle slot is computed
        self._end_ids: frozenset[int] | None = frozenset()  # as where there is no request
        self._stale = True  # the remaining tokens of slots must be computed again

    def keep_rows(self, rows: Callable[[int], int]) -> None:
        """Keep the first ``rows(slot)`` rows of idle slots unchanged: rounds write after them."""
        self._first_idle = rows
        for slot in range(len(self.slots)):
            self._set_commit(slot, 0, rows(slot))

    def seat(self, slot: int, request: Request) -> Slot:
        """Give a slot to a request before its prefill.

        Until then rounds compute unused tokens in its slot, from the first row after the prompt on.
        """
        seated = self.slots[slot] = Slot(request)
        self._requests_changed()
        self._set_commit(slot, 0, len(request.prompt))
        return seated

    def join(self, slot: int, first: PrefillResult, *, cached: int | None = None) -> RequestOutput:
        """Let the request in a slot take part in rounds: its prefill is done, and its first token is known.

        cached  tokens of its prompt that were cached; None: without prefix caching
        """
        seated = self.slots[slot]
        assert seated is not None
        row, self.reading = seated.sampling, None
        self.sampling.params[slot], self.sampling.seeds[slot], seated.kind = row.params[0], row.seeds[0], row.kind
        seated.depth = min(self._shape.max_accept, seated.request.most_drafted)
        insort(self.active, slot)
        self._requests_changed()
        self._set_commit(slot, first.token, len(seated.request.prompt))
        if first.features is not None:
            self._features(first.features)[slot, 0] = first.features[-1]
        output = self._append(slot, seated, [first.token], accepted=(0, 0), scores=first.scores)
        if first.prompt_logprobs is not None:
            output = replace(output, prompt_logprobs=tuple(first.prompt_logprobs))
        if cached is None:
            return output
        self._statistics.prefix_cache_queries += len(seated.request.prompt)
        self._statistics.prefix_cache_hits += cached
        return replace(output, cached_tokens=cached)

    def apply(self, result: RoundResult) -> list[RequestOutput]:
        """Take over what rounds committed; one output for every request and round."""
        self.commit = commit = result.commit
        if len(self.active) < len(self.slots):
            for index, seated in enumerate(self.slots):  # the round advanced the idle ones like the others
                if seated is None:
                    commit.first_row[index] = self._first_idle(index)
                elif seated.kind is None:
                    commit.first_row[index] = seated.prompt_length
        statistics = self._statistics
        statistics.draft_seconds += result.draft_seconds
        statistics.verify_seconds += result.verify_seconds
        if result.draft_length is not None:
            statistics.draft_lengths += [result.draft_length] * len(result.reports)
        outputs = []
        for report in result.reports:
            for slot in tuple(self.active):
                seated = self.slots[slot]
                assert seated is not None
                tokens, drafted = report.tokens[slot], report.drafted[slot]
                seated.left -= len(tokens)
                self._stale |= seated.left < 0
                # Several plain steps in one graph commit tokens that no drafter proposed.
                accepted = min(len(tokens) - 1, drafted)
                scores = () if report.scores is None else report.scores[slot]
                replaced = () if report.replaced is None else tuple(report.replaced[slot])
                output = self._append(
                    slot, seated, tokens, accepted=(accepted, drafted), scores=scores, replaced=replaced
                )
                statistics.count(drafted, output.accepted, rounds=len(tokens) - accepted)
                if report.predicted is not None and (predicted := min(drafted, report.predicted[slot])):
                    stood = min(predicted, output.accepted)
                    output = replace(
                        output, accepted_prediction_tokens=stood, rejected_prediction_tokens=predicted - stood
                    )
                outputs.append(output)
        return outputs

    def next_move(self) -> tuple[int, int, int] | None:
        """Return a slot whose request should move to a free one, that one, and rows of its sequence, if rounds of fewer
        slots could then be computed; else None.
        """
        buckets = self._shape.batch_buckets
        if len(buckets) < 2 or not self.active:
            return None
        last = self.active[-1]
        enough = bisect_left(buckets, len(self.slots) - self.slots.count(None))
        if bisect_left(buckets, last + 1) <= enough:
            return None
        to = next(slot for slot, seated in enumerate(self.slots) if seated is None)
        seated = self.slots[last]
        assert seated is not None
        return None if to > last else (last, to, len(seated.text))

    def move(self, slot: int, to: int) -> None:
        self.slots[to], self.slots[slot] = self.slots[slot], None
        self.active.remove(slot)
        insort(self.active, to)
        sampling, commit = self.sampling, self.commit
        sampling.params[to], sampling.seeds[to] = sampling.params[slot], sampling.seeds[slot]
        sampling.params[slot] = _IDLE_PARAMS
        for one in (commit.tokens, commit.count, commit.first_row):
            one[to] = one[slot]
        if commit.states is not None:
            features = self._features(commit.states)
            features[to] = features[slot]
        self._requests_changed()
        self._set_commit(slot, 0, self._first_idle(slot))

    def abort(self, indices: Collection[int]) -> None:
        for slot, seated in enumerate(self.slots):
            if seated is not None and seated.request.index in indices:
                self._free(slot)

    def clear(self) -> None:
        self.abort([seated.request.index for seated in self.slots if seated is not None])

    def limits(self, *, single: bool = False) -> RoundLimits:
        """Return the limits of the next round. ``single``: no other round follows it in the same call."""
        slots = self.slots
        longest = max((len(one.text) + (one.kind is None) for one in slots if one is not None), default=1)
        if self._stale:
            self._work_out(longest)
        deepest, remaining = [0] * len(slots), [IDLE] * len(slots)
        for index in self.active:
            seated = slots[index]
            assert seated is not None
            deepest[index], remaining[index] = min(seated.depth, seated.left), seated.left
        used_slots = self.active[-1] + 1 if self.active else None
        if single or self._end_ids is None:
            return RoundLimits(deepest, longest, used_slots, 1, remaining)
        return RoundLimits(deepest, longest, used_slots, MAX_CONSECUTIVE_ROUNDS, remaining, self._end_ids)

    def _work_out(self, longest: int) -> None:
        """Compute how many nodes every sequence could accept in a round that is deep enough."""
        max_positions, buckets = self._shape.max_positions, self._shape.kv_buckets
        border = buckets[min(bisect_left(buckets, longest), len(buckets) - 1)] if buckets else sys.maxsize
        for slot in self.slots:
            if slot is not None:
                length = len(slot.text)
                most = min(slot.remaining - 1, border - length)
                if max_positions is not None and slot.request.use_speculation:
                    most = min(most, max_positions - length + 1)
                slot.left = max(0, most)
        self._stale = False

    def _requests_changed(self) -> None:
        seated = [slot for slot in self.slots if slot is not None]
        kind = widest(slot.kind for slot in seated if slot.kind is not None)
        if kind != self.sampling.kind:
            self.sampling = replace(self.sampling, kind=kind)
        self._stale = True
        end_ids = frozenset[int]().union(*(slot.request.eos for slot in seated))
        # None: a sequence may stop for another reason than an id, so the host looks at every round.
        self._end_ids = None if any(slot.checks_each_token for slot in seated) else end_ids

    def _features(self, example: Tensor) -> Tensor:
        """Features of the commit, to write into; made when the first prompt that has some is read."""
        features = self.commit.states
        if features is None:
            features = example.new_zeros(*self.commit.tokens.shape, example.shape[-1])
        self.commit = replace(self.commit, features=features)
        return features

    def _append(
        self,
        slot: int,
        seated: Slot,
        tokens: Sequence[int],
        *,
        accepted: tuple[int, int],
        scores: Sequence[TokenScore],
        replaced: tuple[int, ...] = (),
    ) -> RequestOutput:
        """``accepted``: how many of the tokens were drafted, and how deep the proposal went."""
        kept, reason = seated.extend(tokens) if seated.error is None else (seated.take_appended(), "error")
        self._statistics.new_tokens += kept
        if reason is not None:
            self._free(slot)
        stood, drafted = accepted
        output = RequestOutput(
            seated.request.index, tuple(tokens[:kept]), min(stood, kept), reason, drafted=drafted, error=seated.error
        )
        request = seated.request
        if not request.output_scores and request.num_logprobs is None:
            return output
        scores = scores[:kept]
        of_model = tuple(score.logprobs for score in scores if score.logprobs is not None)
        return replace(
            output,
            logprobs=tuple(score.processed for score in scores) if request.output_scores else None,
            token_logprobs=None if request.num_logprobs is None else of_model,
            replaced=replaced if request.num_logprobs is not None and stood < drafted else (),
        )

    def _free(self, slot: int) -> None:
        """Take a request out of its slot, which then computes unused tokens in rows that no request needs."""
        self.slots[slot] = None
        if self.reading is not None and slot == self.reading[0]:
            self.reading = None
        self.freed.append(slot)
        if slot in self.active:
            self.active.remove(slot)
        self.sampling.params[slot] = _IDLE_PARAMS
        self._requests_changed()
        self._set_commit(slot, 0, self._first_idle(slot))

    def _set_commit(self, slot: int, token: int, first_row: int) -> None:
        commit = self.commit
        commit.tokens[slot] = PAD
        commit.tokens[slot, 0] = token
        commit.count[slot] = 1
        commit.first_row[slot] = first_row
