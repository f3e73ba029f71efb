"""The messages between a target and its drafter: ids and counts as 32-bit words, one message each way a round.

Requests (target to drafter): Hello, Admit, Ask. Replies: Welcome, Answer, Failure. No pickle: what comes from a socket
is never run. Not here: sockets (`channel`) and what is done with a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import ChannelError
from paceline.core.types import Bounds, Commit, SamplingBatch

VERSION = 1
_HEAD = struct.Struct("<BBHq")  # version, kind, nothing (so that words are aligned), number of the message
_TWO, _FOUR = struct.Struct("<ii"), struct.Struct("<iiii")
_HELLO, _ADMIT, _ASK, _WELCOME, _ANSWER, _FAILURE = range(1, 7)


@dataclass(frozen=True, slots=True)
class Hello:
    """A target introduces itself. ``slots`` B of its batch, ``vocab_size`` V of its ids."""

    number: int
    client: str
    slots: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The drafter's reply. ``nodes`` N of its proposals; ``reach`` positions it follows, None = all; its process."""

    number: int
    nodes: int
    reach: int | None
    pid: int


@dataclass(frozen=True, slots=True)
class Admit:
    """A request took a slot; its prompt. Not answered."""

    number: int
    slot: int
    text: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A round: read these texts anew (slot, ids), then propose what follows the commit."""

    number: int
    texts: tuple[tuple[int, tuple[int, ...]], ...]
    commit: Commit
    sampling: SamplingBatch
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class Answer:
    """A proposal. tokens [B, N] int32; ``ahead``: it was ready before it was asked for."""

    number: int
    tokens: Tensor
    ahead: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The drafter could not serve the message of that number."""

    number: int
    reason: str


Request = Hello | Admit | Ask
Reply = Welcome | Answer | Failure


def encode(message: Request | Reply) -> bytes:
    """A message as bytes."""
    if isinstance(message, Ask):
        return _head(_ASK, message.number) + _ask(message)
    if isinstance(message, Answer):
        shape = (*message.tokens.shape, int(message.ahead), 0)
        return _head(_ANSWER, message.number) + _FOUR.pack(*shape) + _words(message.tokens)
    if isinstance(message, Admit):
        return _head(_ADMIT, message.number) + _text(message.slot, message.text)
    if isinstance(message, Hello):
        body = _TWO.pack(message.slots, message.vocab_size) + message.client.encode()
        return _head(_HELLO, message.number) + body
    if isinstance(message, Welcome):
        reach = -1 if message.reach is None else message.reach
        return _head(_WELCOME, message.number) + _FOUR.pack(message.nodes, reach, message.pid, 0)
    return _head(_FAILURE, message.number) + message.reason.encode()


def decode(frame: bytearray) -> Request | Reply:
    """The message in a frame.

    Raises:
        ChannelError: the bytes are none.
    """
    try:
        version, kind, _, number = _HEAD.unpack_from(frame)
        if version != VERSION:
            raise ChannelError(f"the other side speaks version {version} of the protocol, not {VERSION}; update it")
        return _READERS[kind](frame, number)
    except (struct.error, KeyError, ValueError, UnicodeDecodeError, RuntimeError) as error:
        raise ChannelError(f"a message of {len(frame)} bytes was not understood ({error})") from error


# ---- writing


def _head(kind: int, number: int) -> bytes:
    return _HEAD.pack(VERSION, kind, 0, number)


def _words(tensor: Tensor) -> bytes:
    """Raw bytes of an int32 or float32 tensor."""
    assert tensor.element_size() == 4, f"{tensor.dtype} does not travel"
    found: bytes = tensor.numpy().tobytes()
    return found


def _text(slot: int, ids: tuple[int, ...]) -> bytes:
    return _TWO.pack(slot, len(ids)) + struct.pack(f"<{len(ids)}i", *ids)


def _ask(message: Ask) -> bytes:
    commit, sampling, bounds = message.commit, message.sampling, message.bounds
    shape = _FOUR.pack(*commit.tokens.shape, bounds.rows, len(message.texts))
    tensors = (commit.tokens, commit.count, commit.start, bounds.limit, sampling.keys, sampling.knobs)
    return shape + b"".join(map(_words, tensors)) + b"".join(_text(slot, ids) for slot, ids in message.texts)


# ---- reading


class _Cursor:
    """Reads a frame from front to back; every number is checked against what is left."""

    def __init__(self, frame: bytearray) -> None:
        self._frame, self._at = frame, _HEAD.size

    def pack(self, form: struct.Struct) -> tuple[int, ...]:
        values = form.unpack_from(self._frame, self._at)
        self._at += form.size
        return values

    def tensor(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        size = 1
        for length in shape:
            if length < 0:
                raise ValueError(f"a length of {length}")
            size *= length
        if 4 * size > len(self._frame) - self._at:
            raise ValueError(f"{size} words wanted, {(len(self._frame) - self._at) // 4} there")
        if not size:
            return torch.empty(shape, dtype=dtype)
        made = torch.frombuffer(self._frame, dtype=dtype, count=size, offset=self._at).view(shape)
        self._at += 4 * size
        return made

    def text(self) -> tuple[int, tuple[int, ...]]:
        slot, length = self.pack(_TWO)
        return slot, tuple(self.tensor(length).tolist())

    def rest(self) -> str:
        found = self._frame[self._at :].decode()
        self._at = len(self._frame)
        return found

    def end(self) -> None:
        if self._at != len(self._frame):
            raise ValueError(f"{len(self._frame) - self._at} bytes too many")


def _read_ask(frame: bytearray, number: int) -> Ask:
    cursor = _Cursor(frame)
    slots, width, rows, texts = cursor.pack(_FOUR)
    tokens, count, start = cursor.tensor(slots, width), cursor.tensor(slots), cursor.tensor(slots)
    limit, keys = cursor.tensor(slots), cursor.tensor(slots, 2)
    knobs = cursor.tensor(slots, 4, dtype=torch.float32)
    read = tuple(cursor.text() for _ in range(texts))
    cursor.end()
    return Ask(number, read, Commit(tokens, count, start), SamplingBatch(knobs, keys), Bounds(limit, rows))


def _read_answer(frame: bytearray, number: int) -> Answer:
    cursor = _Cursor(frame)
    slots, nodes, ahead, _ = cursor.pack(_FOUR)
    tokens = cursor.tensor(slots, nodes)
    cursor.end()
    return Answer(number, tokens, bool(ahead))


def _read_admit(frame: bytearray, number: int) -> Admit:
    cursor = _Cursor(frame)
    slot, ids = cursor.text()
    cursor.end()
    return Admit(number, slot, ids)


def _read_hello(frame: bytearray, number: int) -> Hello:
    cursor = _Cursor(frame)
    slots, vocab_size = cursor.pack(_TWO)
    return Hello(number, cursor.rest(), slots, vocab_size)


def _read_welcome(frame: bytearray, number: int) -> Welcome:
    nodes, reach, pid, _ = _Cursor(frame).pack(_FOUR)
    return Welcome(number, nodes, None if reach < 0 else reach, pid)


def _read_failure(frame: bytearray, number: int) -> Failure:
    return Failure(number, _Cursor(frame).rest())


_READERS: dict[int, Callable[[bytearray, int], Request | Reply]] = {
    _HELLO: _read_hello,
    _ADMIT: _read_admit,
    _ASK: _read_ask,
    _WELCOME: _read_welcome,
    _ANSWER: _read_answer,
    _FAILURE: _read_failure,
}
