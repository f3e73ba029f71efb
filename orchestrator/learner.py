"""`Learner`: lets the head of a generator learn from the texts that it finishes, in another process.

Under ``acceptor="match"`` no head can change a token, so heads may be exchanged while requests are under way. The
process itself is `paceline.eagle.learning`; if it dies, decoding goes on with the head in use.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection, Generator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, Full, Queue
from tempfile import TemporaryFile

from paceline.core.errors import CheckpointError, ConfigurationError, StorageError
from paceline.core.protocols import Drafter
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.weights.hub import checkpoint_path
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.learning import FinishedText, LearningProgress, LearningSettings, current_head
from paceline.engine.engine import Engine, RequestQueue
from paceline.engine.request import Request
from paceline.outputs import RequestOutput, Statistics

log = logging.getLogger("paceline")

_WAITING = 256  # texts that wait for the process; more are dropped
_POLL_S = 5.0  # after which the end of the process is noticed


class Learner:
    """Passes finished texts to the process, and takes over the heads that it writes.

    heads     number of heads taken over
    progress  what the process reported last
    closed    whether the process was ended on purpose

    Raises:
        ConfigurationError: the drafter is no EAGLE head that can learn in this process.
        StorageError: the folder cannot be written.
    """

    def __init__(self, drafter: Drafter, target: CompiledDecoder, *, head: str | None, folder: str) -> None:
        if not isinstance(drafter, EagleDrafter) or head is None or not drafter.learns:
            raise ConfigurationError(
                f"learn: expected a folder with an EAGLE head as the only drafter, without an embedding of its own and "
                f"on one rank of a CPU backend, got {type(drafter).__name__}; omit learn"
            )
        if target.folder is None or not target.on_host:
            raise ConfigurationError(
                "learn: expected a target from a folder, on one rank of a CPU backend, got another; omit learn"
            )
        self._drafter, self._folder, shipped = drafter, Path(folder), checkpoint_path(head)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise StorageError(f"learn: {folder} cannot be written ({error.strerror}); give another folder") from error
        threads = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else 1
        self._settings = LearningSettings(
            str(target.folder), str(shipped), str(self._folder), drafter.draft_shape.depth, threads
        )
        self._texts: Queue[FinishedText] = Queue(_WAITING)
        self._process: subprocess.Popen[str] | None = None
        self.heads, self.progress, self.closed = 0, LearningProgress(0, 0), False
        before = current_head(self._folder, shipped)
        self._next = None if before is None else str(before)
        self._take_over()

    def run(
        self, engine: Engine, queue: RequestQueue, statistics: Statistics
    ) -> Generator[list[RequestOutput], None, None]:
        """Run an engine as `Engine.run`, and learn from its texts."""
        seen = _SeenQueue(queue)
        with closing(engine.run(seen, statistics)) as steps:
            for outputs in steps:
                for output in outputs:
                    text = seen.texts[output.index]
                    text.tokens.extend(output.tokens)
                    if output.finish_reason is not None:
                        del seen.texts[output.index]
                        if output.error is None:
                            self._add(text)
                if self._next is not None:
                    self._take_over()
                yield outputs

    def close(self) -> None:
        self.closed = True
        if self._process is not None:
            self._process.kill()

    def _add(self, text: FinishedText) -> None:
        with suppress(Full):
            self._texts.put_nowait(text)
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.eagle.learning"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            weakref.finalize(self, self._process.kill)
            for work in (_send, _receive):
                threading.Thread(
                    target=work, args=(weakref.ref(self), self._process), daemon=True, name="paceline-learner"
                ).start()

    def _take_over(self) -> None:
        head, self._next = self._next, None
        if head is None:
            return
        try:
            self._drafter.adopt(head)
        except (CheckpointError, OSError) as error:
            log.warning("learn: the head in %s is not used (%s); drafts go on with the one before it", head, error)
            return
        self.heads += 1
        lengths = self.progress.acceptance_length
        figures = ", ".join(f"{name} {value:.2f}" for name, value in lengths.items())
        log.info("learn: drafting with %s; tokens per round: %s", head, figures or "not measured in this process")

    def _reported(self, progress: LearningProgress) -> None:
        self.progress = progress
        self._next = progress.head or self._next


class _SeenQueue:
    """A queue that notes the requests taken from it. ``texts``: of those under way, by their index."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue, self.online = queue, queue.online
        self.texts: dict[int, FinishedText] = {}

    def pop(self, longest: int | None = None) -> Request | None:
        request = self._queue.pop(longest)
        if request is not None:
            self.texts[request.index] = FinishedText(len(request.prompt), list(request.prompt))
        return request

    def take_aborted(self) -> Collection[int]:
        aborted = self._queue.take_aborted()
        for index in aborted:
            self.texts.pop(index, None)
        return aborted


def _send(learner: weakref.ref[Learner], process: subprocess.Popen[str]) -> None:
    """Write the settings, then texts, until the process or the learner ends."""
    assert process.stdin is not None
    owner = learner()
    if owner is None:
        return
    settings, texts = owner._settings, owner._texts
    del owner
    with suppress(BrokenPipeError), process.stdin as lines:
        lines.write(json.dumps(asdict(settings)) + "\n")
        while process.poll() is None:
            with suppress(Empty):
                lines.write(json.dumps(asdict(texts.get(timeout=_POLL_S))) + "\n")
                lines.flush()


def _receive(learner: weakref.ref[Learner], process: subprocess.Popen[str]) -> None:
    """Read what the process reports, until it ends."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            owner = learner()
            if owner is not None:
                owner._reported(LearningProgress(**json.loads(line)))
            del owner
    process.wait()
    owner = learner()
    if owner is not None and not owner.closed:
        log.warning("learn: the process that learns has ended (%d); drafting goes on as it is", process.returncode)
