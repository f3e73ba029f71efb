"""`SharedEngine`: calls from many threads share the rounds of one generator.

Requests take free slots between rounds, in the order of their calls, and leave when they are finished or aborted. A
call that needs rounds of another kind (`CallOptions`) waits until the slots are empty, and calls of the first kind wait
for it. Not here: what a request is (`engine.request`), rounds (`engine.engine`), processes and sockets.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from paceline.core.detokenizer import Decodes
from paceline.core.errors import CheckpointError
from paceline.engine.engine import CallOptions
from paceline.engine.request import Request
from paceline.generator import SpeculativeGenerator
from paceline.outputs import RequestOutput
from paceline.workers.replay import Replay


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


class RequestGroup:
    """The requests of one call, which share a tokenizer.

    options     the kind of rounds they need
    outputs     go to the caller: None ends them, an error is raised there
    unfinished  number of requests
    """

    def __init__(
        self,
        requests: Sequence[Request],
        emitted: Sequence[Sequence[int]],
        *,
        numbers: Sequence[int],
        options: CallOptions,
    ) -> None:
        tokenizer = requests[0].stopping.tokenizer
        self._tokenizer = None if tokenizer is None else GuardedTokenizer(tokenizer)
        self.indices = {number: request.index for number, request in zip(numbers, requests, strict=True)}
        guarded = [
            replace(request, index=number, stopping=replace(request.stopping, tokenizer=self._tokenizer))
            for number, request in zip(numbers, requests, strict=True)
        ]
        self.waiting = deque(zip(guarded, emitted, strict=True))
        self.unfinished, self.options = len(requests), options
        self.outputs: SimpleQueue[RequestOutput | Exception | None] = SimpleQueue()

    @property
    def failed(self) -> CheckpointError | None:
        """Why it cannot go on, if it cannot."""
        return None if self._tokenizer is None else self._tokenizer.failed


class SharedEngine:
    """A `paceline.engine.engine.RequestQueue` of a generator that runs in a thread of its own.

    ``num_outputs``: how many outputs requests have received; it grows while anyone is served.
    """

    def __init__(self, generator: SpeculativeGenerator, replay: Replay | None) -> None:
        self._generator, self._replay = generator, replay
        self._changed = threading.Condition()
        self._groups: dict[str, RequestGroup] = {}  # by ticket, in order of arrival
        self._running: dict[int, RequestGroup] = {}  # by the number of a request in a slot
        self._aborted: set[int] = set()  # requests in slots that the engine is to drop
        self._aborted_early: deque[str] = deque(maxlen=256)  # tickets that were aborted before their call arrived
        self._options = CallOptions()  # of the rounds that run now
        self._numbers = count()
        self.num_outputs = 0
        threading.Thread(
            target=self._work, args=(torch.get_num_threads(),), daemon=True, name="paceline-engine"
        ).start()

    def stream(
        self,
        ticket: str,
        requests: Sequence[Request],
        emitted: Sequence[Sequence[int]],
        *,
        verify_width: int | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Outputs of the requests of one call. From any thread.

        ``emitted``: tokens that each request has emitted before a fault; they are verified again and come out again.
        """
        group = self._enqueue(ticket, requests, emitted, verify_width=verify_width)
        if group is None:
            return
        try:
            while (output := group.outputs.get()) is not None:
                if isinstance(output, Exception):
                    raise output
                yield replace(output, index=group.indices[output.index])
        finally:
            with self._changed:
                if self._groups.get(ticket) is group:
                    self._end(ticket, None)

    def abort(self, ticket: str) -> None:
        """End the stream of that call; its slots are free after the round that runs now."""
        with self._changed:
            if ticket in self._groups:
                self._end(ticket, None)
            else:
                self._aborted_early.append(ticket)

    def _enqueue(
        self, ticket: str, requests: Sequence[Request], emitted: Sequence[Sequence[int]], *, verify_width: int | None
    ) -> RequestGroup | None:
        options = CallOptions.of(requests, verify_width)
        with self._changed:
            if ticket in self._aborted_early:
                return None
            numbers = [next(self._numbers) for _ in requests]
            group = self._groups[ticket] = RequestGroup(requests, emitted, numbers=numbers, options=options)
            self._changed.notify()
            return group

    # ---- the request queue, and the thread that runs rounds

    def pop(self) -> Request | None:
        """See `paceline.engine.engine.RequestQueue`."""
        with self._changed:
            group = self._first_waiting()
            if group is None or group.options != self._options:
                return None
            request, emitted = group.waiting.popleft()
            self._running[request.index] = group
            if self._replay is not None:
                self._replay.expect(emitted)
            return request

    def take_aborted(self) -> Collection[int]:
        """See `paceline.engine.engine.RequestQueue`."""
        with self._changed:
            aborted, self._aborted = self._aborted, set()
            return aborted

    def _first_waiting(self) -> RequestGroup | None:
        return next((group for group in self._groups.values() if group.waiting), None)

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # each thread has a number of its own
        while True:
            with self._changed:
                group = self._changed.wait_for(self._first_waiting)
                assert group is not None
                self._options = group.options
            try:
                for output in self._generator.serve(self, self._options):
                    self._hand_out(output)
            except Exception as error:  # every caller gets it, whatever it is; later calls may succeed
                self._fail(error)
            with self._changed:
                self._end_finished()
                self._aborted.clear()

    def _hand_out(self, output: RequestOutput) -> None:
        with self._changed:
            self._end_finished()
            self.num_outputs += 1
            group = self._running.get(output.index)
            if group is None:
                return
            if (error := group.failed) is not None:
                self._end(next(ticket for ticket, other in self._groups.items() if other is group), error)
                return
            group.outputs.put(output)
            if output.finish_reason is not None:
                del self._running[output.index]
                group.unfinished -= 1

    def _end_finished(self) -> None:
        """End the streams of finished calls: only now, since statistics include their last round from now on."""
        for ticket in [ticket for ticket, group in self._groups.items() if not group.unfinished]:
            self._end(ticket, None)

    def _end(self, ticket: str, error: Exception | None) -> None:
        """The call takes part in no further round."""
        group = self._groups.pop(ticket)
        for index in [index for index, other in self._running.items() if other is group]:
            del self._running[index]
            self._aborted.add(index)
        group.outputs.put(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._end_finished()
            for ticket in list(self._groups):
                self._end(ticket, error)
