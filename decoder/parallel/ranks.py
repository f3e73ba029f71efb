"""The ranks of a sharded model as processes: rank 0 is this process, the others are started by it and repeat its steps.

A step is sent once, as a pickle that names the body, the kernels and every tensor of the body; the other ranks
substitute their own. A call sends its inputs. Decoders of one degree share these processes, so that two of them can be
in one step. The other side is `paceline.decoder.parallel.rank_process`.
"""

from __future__ import annotations

import importlib
import io
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import ConfigurationError, RankError
from paceline.decoder import environment
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import Collectives, GlooGroup, join, leave

EAGER = "paceline.decoder.parallel.ranks:EagerMember"


class Member(Protocol):
    """One rank; rank 0 and the processes of the others each make a member of the same kind.

    keeps_meeting  whether the group's rendezvous folder must exist as long as the group
    """

    keeps_meeting: bool

    def __init__(self, rank: int, degree: int, name: str) -> None: ...

    @property
    def kernels(self) -> Kernels:
        """Kernels with which the rank's steps are made."""

    @property
    def group(self) -> Collectives:
        """Group of all ranks; final once they have joined."""

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables that the process of another rank requires. Called on rank 0."""

    def meet(self, folder: str) -> None:
        """Join the group that meets in a folder; return when all ranks have joined."""

    def leave(self) -> None:
        """Leave the group. A rank that still waits in it fails."""

    def compile(self, graph: Graph) -> Step:
        """Return the callable that runs a step on this rank."""


class EagerMember:
    """A process of this machine, with eager PyTorch and gloo."""

    keeps_meeting = False

    def __init__(self, rank: int, degree: int, name: str) -> None:
        self.kernels: Kernels = TorchKernels()
        self.group = GlooGroup(degree, name)
        self._rank = rank
        self._held: object = None

    def variables(self, rank: int) -> dict[str, str]:
        return {}

    def meet(self, folder: str) -> None:
        self._held = join(str(Path(folder) / "meeting"), self._rank, self.group)

    def leave(self) -> None:
        leave(self.group)

    def compile(self, graph: Graph) -> Step:
        return eager_step(graph)


def eager_step(graph: Graph) -> Step:
    """Return the callable that runs a step as it is written, without gradients."""

    def run(*inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():  # not inference_mode: the host writes into commits
            return list(graph.module(*inputs))

    return run


def make_member(path: str, rank: int, degree: int, *, name: str) -> Member:
    """Create a member of the class ``path``, "module:Class"."""
    module, _, attribute = path.partition(":")
    made: Member = getattr(importlib.import_module(module), attribute)(rank, degree, name)
    return made


def parts_of(first: nn.Module, others: Sequence[nn.Module]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield every tensor of rank 0's module with those of that name in the others, unless all are one and the same."""
    named = [_tensors(module) for module in others]
    for name, tensor in _tensors(first).items():
        parts = [tensors[name] for tensors in named]
        if any(part is not tensor for part in parts):
            yield tensor, parts


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    return tensors


_PATIENCE = 5.0  # seconds a process gets to end normally
_FAREWELL = 1.0  # seconds to wait for the last message of a process that failed


class Ranks:
    """A group of ``degree`` ranks. It ends when the last body in it is released, or with this process.

    ``kind``: class of the `Member`, "module:Class". RankError, here and in methods: a process did not start, or ended.
    """

    def __init__(self, degree: int, kind: str = EAGER) -> None:
        self._kind, self._name = kind, f"paceline-{uuid.uuid4().hex}"
        self.member: Member = make_member(kind, 0, degree, name=self._name)
        self._lock = threading.RLock()
        self._bodies: weakref.WeakKeyDictionary[ModelWithCache, int] = weakref.WeakKeyDictionary()
        self._names = WeakTensorKeyDictionary()  # tensors that the other ranks have too, with their names
        self._open: set[int] = set()
        self._left: list[int] = []  # released bodies, not yet reported to the other ranks
        self._steps: dict[int, int] = {}  # the body of each step
        self._count = 0
        self._others = [_start(self.member.variables(rank)) for rank in range(1, degree)]
        self._end = weakref.finalize(self, _end, self.member, self._others)
        try:
            with ExitStack() as meeting:
                place = tempfile.TemporaryDirectory(prefix="paceline-ranks-", ignore_cleanup_errors=True)
                self._meet(degree, meeting.enter_context(place))
                # A temporary folder is deleted as soon as all ranks have joined: after a kill no process would remove
                # it.
                if self.member.keeps_meeting:
                    weakref.finalize(self, meeting.pop_all().close)
        except (OSError, RuntimeError) as error:
            lost = self._lost(error)
            self._end()
            raise lost from error
        except BaseException:
            self._end()
            raise

    def _meet(self, degree: int, folder: str) -> None:
        threads = max(1, torch.get_num_threads() // degree)
        for rank, (_, pipe) in enumerate(self._others, 1):
            pipe.send((self._kind, rank, degree, self._name, folder, threads, sys.path))
        self._answers()  # all have started, so that the join cannot wait for a missing rank
        self.member.meet(folder)
        self._answers()  # all have joined

    @property
    def alive(self) -> bool:
        return bool(self._end.alive)

    @property
    def processes(self) -> list[int]:
        """Ids of the other ranks' processes."""
        return [process.pid for process, _ in self._others]

    def adopt(self, body: ModelWithCache, path: str, *, config: ModelConfig, options: DecoderOptions) -> int:
        """Make every other rank load its shard of the model whose rank 0 shard is ``body``. -> the body's number"""
        with self._lock:
            number = self._next()
            self._open.add(number)
            self._check(number)
            try:
                # The processes may be older than a change of this one's folder.
                self._send("load", number, str(Path(path).absolute()), config=config, options=options)
                self._answers()
            except BaseException:
                self.release(number)
                raise
            self._bodies[body] = number
            for name, tensor in (*body.named_parameters(), *body.named_buffers()):
                self._names[tensor] = ("of body", number, name)
            weakref.finalize(body, self.release, number)
            return number

    def release(self, number: int) -> None:
        """Release a body; the last one ends the processes."""
        with self._lock:
            if number not in self._open:
                return
            self._open.remove(number)
            if not self._open:
                self._end()
            else:
                self._left.append(number)  # sent with the next order: a finaliser may run in the middle of one

    def divide(self, number: int, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Send ranks 1 and up the tensors of ``others`` in place of those of ``first``, for the steps of a body."""
        with self._lock:
            self._check(number)
            names = WeakTensorKeyDictionary()
            given: list[list[tuple[object, bool, bytes]]] = [[] for _ in others]
            for tensor, parts in parts_of(first, others):
                names[tensor] = ("sent", uuid.uuid4().hex)
                for tensors, part in zip(given, parts, strict=True):
                    tensors.append((names[tensor], isinstance(part, nn.Parameter), _packed(part)))
            self._send_each("take", given)
            self._names.update(names)

    def make(self, number: int, graph: Graph) -> int:
        """Send a step of a body to all other ranks, which compile it as rank 0 does. -> its number"""
        with self._lock:
            self._check(number)
            step_number = self._next()
            try:
                stream = io.BytesIO()
                sender = _Sender(stream, self._bodies, self._names)
                sender.dump(graph.module)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ConfigurationError(
                    f"{graph.name}: cannot be sent to the other ranks ({error}); build the drafter's step from "
                    "modules that can be pickled, or pass fused=False"
                ) from error
            self._send("make", number, step_number, stream.getvalue(), key=graph.key, example=graph.example)
            self._answers()
            self._names.update(sender.new)  # only now do the other ranks have them
            self._steps[step_number] = number
            return step_number

    def run(self, number: int, step: Step, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run a step on all ranks; ``step`` is rank 0's. -> its outputs, the same on each rank"""
        with self._lock:
            self._check(self._steps[number])
            self._send("run", number, list(inputs))
            try:
                with torch.no_grad():
                    return list(step(*inputs))
            except BaseException as error:
                # The ranks are no longer at the same step: none of them can continue.
                lost = self._lost(error) if isinstance(error, RuntimeError) else None
                self._end()
                if lost is not None:
                    raise lost from error
                raise

    def _check(self, body: int) -> None:
        if body not in self._open or not self.alive:
            raise RankError("the other ranks of this decoder have exited: it was closed, or one failed; load it again")

    def _send(self, order: str, *rest: Any, **named: Any) -> None:
        """Send an order, a method of `rank_process.Follower`, with its arguments."""
        try:
            # Plain pickle: a Connection's own would pass tensors as shared memory, which needs related processes.
            left, self._left = self._left, []
            orders = [*(("release", (number,), {}) for number in left), (order, rest, named)]
            for data in map(pickle.dumps, orders):
                for _, pipe in self._others:
                    pipe.send_bytes(data)
        except OSError as error:
            lost = self._lost(error)
            self._end()
            raise lost from error

    def _send_each(self, order: str, given: Sequence[object]) -> None:
        try:
            for (_, pipe), own in zip(self._others, given, strict=True):
                pipe.send_bytes(pickle.dumps((order, (own,), {})))
        except OSError as error:
            lost = self._lost(error)
            self._end()
            raise lost from error

    def _answers(self) -> None:
        failed: list[Exception] = []
        for _, pipe in self._others:
            try:
                answer = pipe.recv()
            except (OSError, EOFError) as error:
                lost = self._lost(error)
                self._end()
                raise lost from error
            failed += [] if answer is None else [answer]
        if failed:
            raise failed[0]

    def _lost(self, error: BaseException) -> RankError:
        ready = [pipe for _, pipe in self._others if not pipe.closed]
        heard = wait(ready, _FAREWELL) if ready else []
        reasons = []
        for rank, (process, pipe) in enumerate(self._others, 1):
            words = _last_words(pipe) if pipe in heard else ""
            if not words and pipe in heard:  # its end of the pipe is closed, so it ends or has ended
                with suppress(subprocess.TimeoutExpired):
                    words = f"ended with status {process.wait(_FAREWELL)}"
            reasons += [f"rank {rank} {words}"] if words else []
        reason = "; ".join(reasons) or f"{type(error).__name__}: {error}"
        return RankError(f"a rank of the model exited ({reason}), so all ranks were stopped; load the decoder again")

    def _next(self) -> int:
        self._count += 1
        return self._count


class _Sender(pickle.Pickler):
    """Pickles a step: names what the other ranks have, and sends a tensor that is ``new`` to them once."""

    def __init__(
        self, stream: io.BytesIO, bodies: weakref.WeakKeyDictionary[ModelWithCache, int], names: WeakTensorKeyDictionary
    ) -> None:
        super().__init__(stream)
        self._bodies, self._names = bodies, names
        self.new = WeakTensorKeyDictionary()

    def persistent_id(self, item: Any) -> Any:
        if isinstance(item, ModelWithCache):
            if item not in self._bodies:
                raise ConfigurationError(
                    "tp_degree: expected the same value for draft and target, which share a graph, got different "
                    "ones; load both with one degree, or pass fused=False"
                )
            return "body", self._bodies[item]
        if isinstance(item, Kernels):
            return ("kernels",)
        if not isinstance(item, Tensor):
            return None
        for known in (self._names, self.new):
            if item in known:
                return known[item]
        name = ("sent", uuid.uuid4().hex)
        self.new[item] = name
        return "new", name, isinstance(item, nn.Parameter), _packed(item)


def _packed(x: Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(x.detach().clone(), stream)
    return stream.getvalue()


def shared(degree: int, kind: str = EAGER) -> Ranks:
    """Return this process's group of ``degree`` ranks of a kind; start it if it does not exist."""
    known = _known()
    ranks = known.get((degree, kind))
    if ranks is None or not ranks.alive:
        ranks = known[degree, kind] = Ranks(degree, kind)
    return ranks


@lru_cache(maxsize=1)
def _known() -> weakref.WeakValueDictionary[tuple[int, str], Ranks]:
    return weakref.WeakValueDictionary()


def _start(variables: dict[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process in a separate session: Ctrl-C reaches only this process, which ends the others."""
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.decoder.parallel.rank_process", str(there.fileno())],
            pass_fds=(there.fileno(),),
            env=environment.with_variables(variables),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, Connection(here.detach())


def _last_words(pipe: Connection) -> str:
    try:
        return f"failed: {pipe.recv()}"
    except (OSError, EOFError):
        return ""


def _end(member: Member, others: list[tuple[subprocess.Popen[bytes], Connection]]) -> None:
    """End the processes: closing the pipe ends them; a process that does not react is killed."""
    for _, pipe in others:
        pipe.close()
    for process, _ in others:
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    member.leave()
