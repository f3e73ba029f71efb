"""The engine: requests in, outputs out. Seats requests in free slots, runs rounds, hands out what was committed.

It is built once for a generator. What a call asks of the rounds beyond the choice of tokens (`CallOptions`) selects a
variant, which is built at its first use and kept. Knows no model, no drafter and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from paceline.core.protocols import Reading
from paceline.core.reading import finish
from paceline.core.sampling import sampling_tensors
from paceline.core.types import Commit, PrefillResult, RoundLimits, RoundResult, SamplingTensors, TokenScore
from paceline.engine.batch import Batch, RoundShape, Slot
from paceline.engine.queue import RequestQueue
from paceline.engine.request import Request
from paceline.outputs import RequestOutput, Statistics

BOOK_AFTER_S = 0.1
"""Seconds after which the times in the statistics are brought up to date: more often costs more than it tells."""


class TimedRound(Protocol):
    """A `paceline.core.protocols.Round` that says where its time went, and the draft length it chose, if it chooses.

    Seconds add up over all rounds since it was built.
    """

    @property
    def draft_length(self) -> int | None: ...

    @property
    def prefill_seconds(self) -> float: ...

    @property
    def draft_seconds(self) -> float: ...

    @property
    def verify_seconds(self) -> float: ...

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading: ...

    def finish_request(self, slot: int) -> None: ...

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult: ...


class HasLogprobs(Protocol):
    """Where the scores of the last tokens of every slot are found."""

    @property
    def logprobs(self) -> list[list[TokenScore]]: ...


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a call asks of the rounds of all its requests. What one request asks is a property of its row.

    verify_width  rows of the verifying graph; None = as the drafter needs
    """

    verify_width: int | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """A round and what the engine must know of it; ```logprobs`` if it decides on the host."""

    round: TimedRound
    shape: RoundShape
    logprobs: HasLogprobs | None = None


VariantBuilder = Callable[[CallOptions, Sequence[Slot | None]], Variant]
"""Builds a variant. It may keep the sequence: there it finds, during a run, the request of every slot."""


@dataclass(slots=True)
class Engine:
    """Serves requests on ``num_slots`` slots, one run at a time."""

    num_slots: int
    build: VariantBuilder
    _slots: list[Slot | None] = field(init=False)
    _variants: dict[CallOptions, Variant] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._slots = [None] * self.num_slots

    def variant(self, options: CallOptions) -> Variant:
        """The variant for these options.

        Raises:
            ConfigurationError: no rounds can do what they ask for.
        """
        variant = self._variants.get(options)
        if variant is None:
            variant = self._variants[options] = self.build(options, self._slots)
        return variant

    def run(
        self, queue: RequestQueue, options: CallOptions, statistics: Statistics
    ) -> Generator[RequestOutput, None, None]:
        """Run until the queue is empty and every request has finished; at most one output for a request and round."""
        for outputs in self.steps(queue, options, statistics):
            yield from outputs

    def steps(
        self, queue: RequestQueue, options: CallOptions, statistics: Statistics
    ) -> Generator[list[RequestOutput], None, None]:
        """The same, step by step: what each prompt and each call of the rounds gave to all requests together.

        A list may be empty: it is a sign of life, after a chunk of a prompt. The queue is asked again between any two
        of them. Where it is ``paced``, one chunk of one prompt is read between two rounds, so that who is in a slot
        never waits longer than a chunk and a round; otherwise all free slots are filled first.
        """
        variant = self.variant(options)
        rounds, logprobs = variant.round, variant.logprobs
        clock = _Clock(rounds, statistics)
        batch = Batch(self._slots, variant.shape, statistics)
        held: set[int] = set()  # slots whose request the round knows
        joining: _Joining | None = None
        try:
            while True:
                if aborted := queue.take_aborted():
                    batch.abort(aborted)
                    if joining is not None and joining.request.index in aborted:
                        joining = None
                    _finish(rounds, held, batch.seated)
                outputs, read = list[RequestOutput](), False
                for _ in range(self.num_slots):  # no more: where texts end at once there is always a free slot
                    if joining is None:
                        if len(batch.active) == self.num_slots or (request := queue.pop()) is None:
                            break
                        slot = batch.slots.index(None)
                        held.add(slot)
                        batch.seat(slot, request)  # before the round is chosen by what the request needs
                        joining = _Joining(request, slot, rounds)
                    read = True
                    first = joining.read(whole=not queue.paced)
                    if first is None:
                        break
                    scores = list(logprobs.logprobs[joining.slot]) if logprobs is not None else None
                    outputs.append(batch.join(joining.slot, joining.sampling, first, logprobs=scores))
                    joining = None
                    if len(held) > len(batch.seated):  # the text ended with its first token
                        _finish(rounds, held, batch.seated)
                    if queue.paced:
                        break
                if read:
                    yield from clock.handed_over(outputs)
                elif not batch.active:
                    break
                if batch.active:
                    result = rounds(batch.commit, batch.sampling, batch.limits(single=read and queue.paced))
                    if rounds.draft_length is not None:
                        statistics.draft_lengths += [rounds.draft_length] * len(result.reports)
                    outputs = batch.apply(result, logprobs.logprobs if logprobs is not None else None)
                    if len(held) > len(batch.seated):
                        _finish(rounds, held, batch.seated)
                    yield from clock.handed_over(outputs)
        finally:
            _finish(rounds, held, ())
            clock.book()


class _Clock:
    """Where the time of one run goes. The consumer's time, between two steps, is not counted."""

    def __init__(self, rounds: TimedRound, statistics: Statistics) -> None:
        self._rounds, self._statistics, self._away = rounds, statistics, 0.0
        self._before = (rounds.prefill_seconds, rounds.draft_seconds, rounds.verify_seconds)
        self._begin = perf_counter()

    def handed_over(self, outputs: list[RequestOutput]) -> Generator[list[RequestOutput], None, None]:
        """One step for the consumer, with statistics that are up to date."""
        left = perf_counter()
        if left - self._begin > BOOK_AFTER_S:
            self.book()
        yield outputs
        self._away += perf_counter() - left

    def book(self) -> None:
        """Add the times since this was last done to the statistics."""
        rounds, statistics, now = self._rounds, self._statistics, perf_counter()
        after = (rounds.prefill_seconds, rounds.draft_seconds, rounds.verify_seconds)
        prefill, draft, verify = (new - old for new, old in zip(after, self._before, strict=True))
        statistics.prefill_seconds += prefill
        statistics.draft_seconds += draft
        statistics.verify_seconds += verify
        statistics.host_seconds += max(0.0, now - self._begin - self._away - prefill - draft - verify)
        self._before, self._begin, self._away = after, now, 0.0


class _Joining:
    """A request whose prompt is being read."""

    def __init__(self, request: Request, slot: int, rounds: TimedRound) -> None:
        self.request, self.slot = request, slot
        self.sampling = sampling_tensors([request.sampling])
        self._reading = rounds.start(slot, request.prompt, self.sampling)

    def read(self, *, whole: bool) -> PrefillResult | None:
        """Read the next chunk, or all that is left. None: there is more to read."""
        if whole:
            return finish(self._reading)
        try:
            next(self._reading)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # a generator of that type returns it
        return None


def _finish(rounds: TimedRound, held: set[int], seated: Collection[int]) -> None:
    """Tell the round which requests have left their slots; no slot is seated without being held."""
    for slot in sorted(held.difference(seated)):
        held.discard(slot)
        rounds.finish_request(slot)
