"""Calls to a shared engine: requests of a caller, updates sent to it, and the state of a call in between."""

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
from paceline.text.tokenizer import decoder_of


@dataclass(frozen=True, slots=True)
class Call:
    """Requests of a caller that are served together.

    ticket        unique among the calls under way; argument of `SharedEngine.end`
    requests      as `Request.batch` makes them
    key           identifies the caller: keys take turns, and so do the calls of a key
    deadline      `time.monotonic` by which all is finished, else the call ends with DeadlineError; None: no limit
    interval_s    seconds between two updates, if rounds are shorter; the first output of a request, its last one and
                  errors do not wait. 0: an update for every round
    """

    ticket: str
    requests: Sequence[Request]
    key: str = ""
    deadline: float | None = None
    interval_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Seconds of a finished request until it got a slot, from then until its first token, and until its end."""

    queue: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class CallUpdate:
    """Update for one call after one step of the engine, or after several together.

    ended     no other update follows
    error     why it ended before its requests were finished; None also if it was aborted
    """

    ticket: str
    outputs: tuple[RequestOutput, ...] = ()
    ended: bool = False
    error: Exception | None = None

    @classmethod
    def joined(cls, updates: Sequence[CallUpdate]) -> CallUpdate:
        if len(updates) == 1:
            return updates[0]
        outputs = tuple(output for update in updates for output in update.outputs)
        last = updates[-1]
        return cls(last.ticket, outputs, last.ended, last.error)


Sink = Callable[[list[CallUpdate]], None]
"""Receive the updates of one step, of all calls that share the sink. Runs in the engine's thread; must not block."""


class GuardedTokenizer:
    """Tokenizer that never raises in a round, where the error would end the requests of other callers too.

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
            reason = f"{text!r} is not a text"
        except Exception as error:  # tokenizers raise errors of any class
            reason = repr(error)
        self.failed = CheckpointError(
            f"stop_strings: the tokenizer cannot turn ids {token_ids} into text ({reason}); give the model its own "
            "tokenizer, or omit stop_strings"
        )
        return ""


@dataclass(slots=True)
class SeatedTimes:
    """Times when a request got its slot and produced its first token, by `time.monotonic`."""

    seated: float
    first: float | None = None


@dataclass(slots=True)
class CallState:
    """Call that is not over, used in the engine's thread or under its lock.

    waiting     requests without a slot, numbered as the engine knows them
    running     requests in slots, by that number
    unfinished  number of requests
    held        updates that wait to be delivered with later ones, since `sent_s`
    """

    call: Call
    sink: Sink
    indices: dict[int, int]  # number -> index in the call
    tokenizer: GuardedTokenizer | None
    waiting: deque[Request]
    unfinished: int
    arrived: float = field(default_factory=monotonic)
    running: dict[int, SeatedTimes] = field(default_factory=dict)
    held: list[CallUpdate] = field(default_factory=list)
    sent_s: float = float("-inf")

    @classmethod
    def of(cls, call: Call, sink: Sink, numbers: Sequence[int]) -> CallState:
        shared = call.requests[0].tokenizer
        tokenizer = None if shared is None else GuardedTokenizer(decoder_of(shared))
        guarded = [
            replace(request, index=number, tokenizer=tokenizer)
            for number, request in zip(numbers, call.requests, strict=True)
        ]
        indices = {number: request.index for number, request in zip(numbers, call.requests, strict=True)}
        return cls(call, sink, indices, tokenizer, deque(guarded), len(guarded))

    def seat(self) -> Request:
        request = self.waiting.popleft()
        self.running[request.index] = SeatedTimes(monotonic())
        return request

    def leave(self, indices: Collection[int]) -> list[int]:
        numbers = [number for number in self.running if self.indices[number] in indices]
        for number in numbers:
            del self.running[number]
            self.unfinished -= 1
        return numbers

    def update(self, outputs: Sequence[RequestOutput]) -> tuple[CallUpdate, list[RequestTiming], bool]:
        """Return the update for the caller after a step with these outputs, the timings of requests that ended, and
        whether an output is the first or the last of its request.
        """
        finished, now, urgent = list[RequestTiming](), monotonic(), False
        for output in outputs:
            times = self.running[output.index]
            if times.first is None:
                times.first, urgent = now, True
            if output.finish_reason is not None:
                del self.running[output.index]
                self.unfinished -= 1
                queue, prefill = times.seated - self.arrived, times.first - times.seated
                finished.append(RequestTiming(queue, prefill, now - times.first))
        own_outputs = tuple(replace(output, index=self.indices[output.index]) for output in outputs)
        update = CallUpdate(self.call.ticket, own_outputs, ended=not self.unfinished)
        return update, finished, urgent or bool(finished)


def call_params(params: SamplingParams | None, overrides: Mapping[str, object]) -> SamplingParams:
    """Return ``params`` with some fields replaced, checked for a target in another process.

    Raises:
        SamplingError: a keyword that does not exist, or a wrong value.
        ConfigurationError: a field holds an object that cannot be sent to another process.
    """
    merged = SamplingParams.merge(params, overrides)
    for name in sorted(SamplingParams.in_process_fields()):
        if getattr(merged, name) is not None:
            raise ConfigurationError(
                f"{name}: objects cannot be sent to the target's process; omit it (the target has its own tokenizer "
                "for stop_strings), or decode in this process with SpeculativeGenerator"
            )
    return merged
