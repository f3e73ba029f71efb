"""Drafters that fail on purpose, in separate processes that start fast; no tests."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from paceline.core.protocols import Drafter
from paceline.core.types import Commit, Proposal, RoundLimits, SamplingTensors
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.placement.host.processes import Process
from paceline.placement.lookahead import LookaheadDrafter
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.messages import Handshake
from paceline.placement.remote.server import DrafterPool, DraftServer, UnpooledDrafters
from paceline.workers.draft import SecondChoices
from tests.fakes import Around, TableDecoder, near, table

V = 24
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.8)
SECRET = b"a secret of the tests"

FAULTS = ("raise", "nan", "beyond", "negative", "short", "long", "rows", "float", "drawn", "slow", "die")


def drafter(slots: int, k: int, logits: torch.Tensor = DRAFT) -> ModelDrafter:
    return ModelDrafter(TableDecoder(logits, slots=slots), k, vocabulary=VocabMap(V, V))


def working_ahead(slots: int, k: int, logits: torch.Tensor = DRAFT) -> LookaheadDrafter:
    """The same drafter, which works ahead."""
    made = drafter(slots, k + 1, logits)
    return LookaheadDrafter(made, SecondChoices(made.decoder, made.vocabulary))


class Faulty(Around):
    """A model drafter that makes one of the faults now and then. ``slow``: seconds, more than a deadline."""

    def __init__(self, slots: int, k: int, *, faults: Sequence[str], rate: float, seed: int, slow: float) -> None:
        super().__init__(drafter(slots, k))
        self._nan = drafter(slots, k, DRAFT * float("nan"))
        self._dice, self._faults, self._rate, self._slow = random.Random(seed), faults, rate, slow

    def add_request(self, slot: int, prompt: Sequence[int], features: torch.Tensor | None = None) -> None:
        super().add_request(slot, prompt)
        self._nan.add_request(slot, prompt)

    def finish_request(self, slot: int) -> None:
        super().finish_request(slot)
        self._nan.finish_request(slot)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        made = self.inner.propose(commit, sampling, bounds)
        tokens = made.tokens
        if self._dice.random() >= self._rate:
            return made
        fault = self._dice.choice(self._faults)
        if fault == "raise":
            raise RuntimeError("a fault that was asked for")
        if fault == "nan":
            return self._nan.propose(commit, sampling, bounds)
        if fault == "drawn":
            return Proposal(tokens, None, torch.zeros(*tokens.shape, V))
        if fault == "slow":
            time.sleep(self._slow)
        if fault == "die":
            os._exit(3)
        changed: dict[str, Callable[[], torch.Tensor]] = {
            "beyond": lambda: tokens + V,
            "negative": lambda: tokens - V - 1,
            "short": lambda: tokens[:, :-1],
            "long": lambda: torch.cat((tokens, tokens), 1),
            "rows": lambda: torch.cat((tokens, tokens), 0),
            "float": lambda: tokens.to(torch.float32),
        }
        return Proposal(changed[fault]() if fault in changed else tokens)


def serve(address: str, k: int, faults: Sequence[str], rate: float, seed: int, slow: float, ahead: bool) -> None:
    """The main function of a process."""
    torch.set_num_threads(1)

    def make(handshake: Handshake) -> Drafter:
        if ahead:
            return working_ahead(handshake.slots, k)
        return Faulty(handshake.slots, k, faults=faults, rate=rate, seed=seed, slow=slow)

    DraftServer(listen(Address.parse(address)), SECRET, UnpooledDrafters(make)).run()


class Forked:
    """A supervisor whose processes start from a server that has everything imported already."""

    def __init__(
        self,
        folder: Path,
        *,
        k: int = 4,
        faults: Sequence[str] = (),
        rate: float = 0.0,
        slow: float = 0.5,
        ahead: bool = False,
        seed: int = 0,
    ) -> None:
        self.address = Address(path=str(folder / "draft.sock"))
        self._asked = (k, tuple(faults), rate, slow, ahead)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.placement.faulty"])
        self._process: ForkServerProcess | None = None
        self._seed, self._closed = seed, False
        self.ensure()

    def replace(self, process: Process | None) -> bool:
        mine = self._process
        if self._closed or (self._runs and mine is not None and process is not None and process.pid != mine.pid):
            return False
        self._start()
        return True

    def ensure(self) -> bool:
        if self._closed or self._runs:
            return False
        self._start()
        return True

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def _start(self) -> None:
        self._end()
        self._seed += 1
        k, faults, rate, slow, ahead = self._asked
        arguments = (str(self.address), k, faults, rate, self._seed, slow, ahead)
        self._process = self._context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()

    def signal(self, number: signal.Signals) -> None:
        process = self._process  # another thread may be about to replace it
        if process is not None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def close(self) -> None:
        self._closed = True
        self._end()


@contextmanager
def serving(listener: socket.socket, drafters: DrafterPool) -> Iterator[None]:
    """Any caller at the listener that knows the tests' secret is served."""
    server = DraftServer(listener, SECRET, drafters)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()
