"""A desk: calls from many threads share the rounds of one generator.

Requests join free slots between rows of rounds, in the order of the calls, and leave when they are done or unwanted.
A call with logits processors needs other rounds: it waits until the slots are empty, and has them for itself.
Not here: what a request is (`request`), rounds (`loop`), processes and sockets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from paceline.core.detokenizer import Decodes
from paceline.core.errors import CheckpointError
from paceline.engine.engine import CallOptions
from paceline.engine.request import Request
from paceline.generator import Sampler
from paceline.outputs import RequestOutput
from paceline.target.host_verifier import Processor
from paceline.workers.replay import Replay


class GuardedTokenizer:
    """A tokenizer that raises in no round, since others are in it too. ``failed``: what it would have raised."""

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self.failed: CheckpointError | None = None

    def decode(self, token_ids: list[int], **options: Any) -> str:
        try:
            text: object = self._tokenizer.decode(token_ids, **options)
            if isinstance(text, str):
                return text
            why = f"{text!r} is no text"
        except Exception as error:  # tokenizers raise what they like
            why = repr(error)
        self.failed = CheckpointError(
            f"the tokenizer cannot turn ids {token_ids} into text, in which stop strings are looked for ({why}); "
            "give the model its own tokenizer, or no stop strings"
        )
        return ""


class RequestGroup:
    """Requests that came together, with one tokenizer. ``told``: events for whoever called; None ends them."""

    def __init__(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]], processor: Processor | None):
        tokenizer = requests[0].stopping.tokenizer
        self._reader = None if tokenizer is None else GuardedTokenizer(tokenizer)
        read = [replace(one, stopping=replace(one.stopping, tokenizer=self._reader)) for one in requests]
        self.waiting = deque(zip(read, emitted, strict=True))
        self.first, self.open, self.processor = requests[0].index, len(requests), processor
        self.told: SimpleQueue[RequestOutput | Exception | None] = SimpleQueue()

    @property
    def failed(self) -> CheckpointError | None:
        """Why it cannot go on, if it cannot."""
        return None if self._reader is None else self._reader.failed


class SharedEngine:
    """A `paceline.engine.engine.RequestQueue` to a generator that runs in a thread of its own. ``events``: how many
    were handed out.
    """

    def __init__(self, generator: Sampler, replay: Replay | None) -> None:
        self._generator, self._replay = generator, replay
        self._changed = threading.Condition()
        self._calls: deque[RequestGroup] = deque()  # those with requests that wait
        self._tickets: dict[str, RequestGroup] = {}
        self._early: deque[str] = deque(maxlen=256)  # tickets given up before they came
        self._seated: dict[int, RequestGroup] = {}
        self._unwanted: set[int] = set()
        self._done: list[RequestGroup] = []  # they hear of it when the books of their last round are closed
        self._period: Processor | None = None
        self._next = self.events = 0
        worker = threading.Thread(target=self._work, args=(torch.get_num_threads(),), daemon=True, name="paceline-desk")
        worker.start()

    def stream(
        self, ticket: str, requests: Sequence[Request], emitted: Sequence[Sequence[int]], *, processor: Processor | None
    ) -> Generator[RequestOutput, None, None]:
        """Events of these requests, by their place in the call. ``emitted``: what each has already, to be verified."""
        call = self._admit(ticket, requests, emitted, processor=processor)
        if call is None:
            return
        try:
            while (told := call.told.get()) is not None:
                if isinstance(told, Exception):
                    raise told
                yield replace(told, index=told.index - call.first)
        finally:
            if self._tickets.get(ticket) is call:
                self.abort(ticket)

    def abort(self, ticket: str) -> None:
        """Nobody wants that call any more: its stream ends, and its slots are free after the round that runs."""
        with self._changed:
            call = self._tickets.pop(ticket, None)
            if call is None:
                self._early.append(ticket)
                return
            self._end(call, None)

    def _admit(
        self, ticket: str, requests: Sequence[Request], emitted: Sequence[Sequence[int]], *, processor: Processor | None
    ) -> RequestGroup | None:
        with self._changed:
            if ticket in self._early:
                return None
            numbered = [replace(request, index=self._next + place) for place, request in enumerate(requests)]
            self._next += len(requests)
            call = self._tickets[ticket] = RequestGroup(numbered, emitted, processor)
            self._calls.append(call)
            self._changed.notify()
            return call

    # ---- the door, and the thread that runs rounds

    def pop(self) -> Request | None:
        """See `paceline.engine.engine.RequestQueue`."""
        with self._changed:
            if not self._calls or self._calls[0].processor is not self._period:
                return None
            call = self._calls[0]
            request, emitted = call.waiting.popleft()
            if not call.waiting:
                self._calls.popleft()
            self._seated[request.index] = call
            if self._replay is not None:
                self._replay.expect(emitted)
            return request

    def take_aborted(self) -> Collection[int]:
        """See `paceline.engine.engine.RequestQueue`."""
        with self._changed:
            found, self._unwanted = self._unwanted, set()
            return found

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # each thread has its own number
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls)
                self._period = self._calls[0].processor
            try:
                for event in self._generator.serve(self, CallOptions(self._period)):
                    self._tell(event)
            except Exception as error:  # whatever it is, every caller hears of it, and the next one may have more luck
                self._fail(error)
            with self._changed:
                self._close_books()
                self._unwanted.clear()

    def _tell(self, event: RequestOutput) -> None:
        with self._changed:
            self._close_books()
            self.events += 1
            call = self._seated.get(event.index)
            if call is None:
                return
            if (failed := call.failed) is not None:
                self._end(call, failed)
                return
            call.told.put(event)
            if event.finish_reason is not None:
                del self._seated[event.index]
                call.open -= 1
                if not call.open:
                    self._done.append(call)

    def _end(self, call: RequestGroup, why: Exception | None) -> None:
        """It takes part in no further round."""
        if call in self._calls:
            self._calls.remove(call)
        mine = [index for index, other in self._seated.items() if other is call]
        self._unwanted.update(mine)
        for index in mine:
            del self._seated[index]
        call.told.put(why)

    def _close_books(self) -> None:
        while self._done:
            self._done.pop().told.put(None)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            for call in {*self._calls, *self._seated.values()}:
                call.told.put(error)
            self._calls.clear()
            self._seated.clear()
