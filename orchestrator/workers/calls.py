"""Calls to a shared engine: what a caller asks, what it hears, and the state of a call between the two.

Not here: whose turn it is, and the thread that runs rounds (`workers.shared_engine`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from paceline.core.detokenizer import Decodes
from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.engine.request import Request, SamplingParams
from paceline.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Call:
    """What one caller asks: requests that are answered together.

    ticket        names the call, like no other that is under way; `SharedEngine.end` takes it
    requests      as `Request.batch` makes them
    key           who asks: keys take turns, and so do the calls of a key
    deadline      `time.monotonic` by which all is finished, else the call ends with DeadlineError; None = no limit
    interval_s    seconds between two updates, if rounds are shorter; the first output of a request, its last one and
                  errors do not wait. 0 = an update for every round
    """

    ticket: str
    requests: Sequence[Request]
    key: str = ""
    deadline: float | None = None
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where the time of a finished request went, in seconds.

    index    of the request in its call
    queue    from its arrival to its slot
    prefill  from there to its first token
    decode   from there to its end
    """

    index: int
    queue: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class CallUpdate:
    """What one call hears of one step of the engine, or of several together.

    ticket    of the call
    outputs   what its requests gained
    finished  timing of the requests that ended with these outputs
    ended     no other update follows
    error     why it ended before its requests were finished; None also where it was aborted
    """

    ticket: str
    outputs: tuple[RequestOutput, ...] = ()
    finished: tuple[RequestTiming, ...] = ()
    ended: bool = False
    error: Exception | None = None

    @classmethod
    def joined(cls, updates: Sequence[CallUpdate]) -> CallUpdate:
        """Those of one call, in order, as one."""
        if len(updates) == 1:
            return updates[0]
        outputs = tuple(output for update in updates for output in update.outputs)
        finished = tuple(timing for update in updates for timing in update.finished)
        last = updates[-1]
        return cls(last.ticket, outputs, finished, last.ended, last.error)


Sink = Callable[[list[CallUpdate]], None]
"""Takes the updates of one step: of all calls that share the sink. Called in the engine's thread; it must not block."""


class GuardedTokenizer:
    """A tokenizer that never raises in a round, where the error would end the requests of other callers too.

    ``failed``: the error it would have raised.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self.failed: CheckpointError | None = None

    def decode(self, token_ids: list[int], **options: Any) -> str:
        try:
            text: object = self._tokenizer.decode(token_ids, **options)
            if isinstance(text, str):
                return text
            reason = f"{text!r} is no text"
        except Exception as error:  # tokenizers raise errors of any class
            reason = repr(error)
        self.failed = CheckpointError(
            f"the tokenizer cannot turn ids {token_ids} into text, in which stop strings are searched ({reason}); "
            "give the model its own tokenizer, or ask without stop strings"
        )
        return ""


@dataclass(slots=True)
class SeatedTimes:
    """When a request in a slot got there, and when its first token was out. `time.monotonic`"""

    seated: float
    first: float | None = None


@dataclass(slots=True)
class CallState:
    """A call that is not over, in the engine's thread or under its lock.

    waiting     requests without a slot, numbered as the engine knows them
    running     those in slots, by that number
    unfinished  number of requests
    """

    call: Call
    sink: Sink
    indices: dict[int, int]  # number -> index in the call
    tokenizer: GuardedTokenizer | None
    waiting: deque[Request]
    unfinished: int
    arrived: float = field(default_factory=monotonic)
    running: dict[int, SeatedTimes] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, sink: Sink, numbers: Sequence[int]) -> CallState:
        """``numbers``: what the engine calls its requests."""
        shared = call.requests[0].stopping.tokenizer
        tokenizer = None if shared is None else GuardedTokenizer(shared)
        guarded = [
            replace(request, index=number, stopping=replace(request.stopping, tokenizer=tokenizer))
            for number, request in zip(numbers, call.requests, strict=True)
        ]
        indices = {number: request.index for number, request in zip(numbers, call.requests, strict=True)}
        return cls(call, sink, indices, tokenizer, deque(guarded), len(guarded))

    @property
    def failed(self) -> CheckpointError | None:
        """Why it cannot go on, if it cannot."""
        return None if self.tokenizer is None else self.tokenizer.failed

    def seat(self) -> Request:
        """Its first waiting request takes a slot."""
        request = self.waiting.popleft()
        self.running[request.index] = SeatedTimes(monotonic())
        return request

    def leave(self, indices: Collection[int]) -> list[int]:
        """These of its requests end, as far as they are in slots. -> what the engine calls them"""
        numbers = [number for number in self.running if self.indices[number] in indices]
        for number in numbers:
            del self.running[number]
            self.unfinished -= 1
        return numbers

    def update(self, outputs: Sequence[RequestOutput]) -> tuple[CallUpdate, bool]:
        """What its caller hears of a step in which its requests gained these outputs, and whether one of them is the
        first or the last of its request.
        """
        finished, now, urgent = [], monotonic(), False
        for output in outputs:
            times = self.running[output.index]
            if times.first is None:
                times.first, urgent = now, True
            if output.finish_reason is not None:
                del self.running[output.index]
                self.unfinished -= 1
                queue, prefill = times.seated - self.arrived, times.first - times.seated
                finished.append(RequestTiming(self.indices[output.index], queue, prefill, now - times.first))
        own_outputs = tuple(replace(output, index=self.indices[output.index]) for output in outputs)
        update = CallUpdate(self.call.ticket, own_outputs, tuple(finished), ended=not self.unfinished)
        return update, urgent or bool(finished)


def call_params(params: SamplingParams | None, overrides: Mapping[str, object]) -> SamplingParams:
    """``params`` with some fields replaced, for a target in another process: checked here, so that no worker sees what
    it could not do.

    Raises:
        SamplingError: a keyword that does not exist, or a wrong value.
        ConfigurationError: a field holds an object that cannot be sent to another process.
    """
    merged = SamplingParams.merge(params, overrides)
    for name in sorted(SamplingParams.in_process_fields()):
        if getattr(merged, name) is not None:
            raise ConfigurationError(
                f"{name} holds objects of this process, and the target runs in another one; leave it out (the target "
                "has its own tokenizer for stop_strings), or decode in this process with SpeculativeGenerator"
            )
    return merged
