"""The messages between a target and its drafter: ids and counts as 32-bit words, one message each way a round.

Requests (target to drafter): Hello, Admit, Ask. Replies: Welcome, Answer, Failure. No pickle: what comes from a socket
is never run. Not here: sockets (`channel`), and tensors (`blanks`) but for how a batch samples.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import ChannelError
from paceline.core.types import SamplingBatch
from paceline.placement.blanks import flat

VERSION = 1
_HEAD = struct.Struct("<BBHq")  # version, kind, nothing (so that words are aligned), number of the message
_TWO, _FOUR, _FIVE = struct.Struct("<ii"), struct.Struct("<iiii"), struct.Struct("<iiiii")
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
    """A round: read these texts anew (slot, ids), then propose what follows the commit.

    slots, width  B and W of the commit
    numbers       its tokens row by row, its counts, its starts, and the limits of the round: B * (W + 3)
    rows          of `Bounds`
    sampling      None: as in the last Ask; it changes only when a request comes or goes
    """

    number: int
    texts: tuple[tuple[int, tuple[int, ...]], ...]
    slots: int
    width: int
    numbers: Sequence[int]
    rows: int
    sampling: SamplingBatch | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A proposal: ``tokens`` row by row, B * N of them. ``ahead``: it was ready before it was asked for."""

    number: int
    slots: int
    nodes: int
    tokens: Sequence[int]
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
        shape = _FOUR.pack(message.slots, message.nodes, int(message.ahead), 0)
        return _head(_ANSWER, message.number) + shape + _words(message.tokens)
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


def _words(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def _text(slot: int, ids: tuple[int, ...]) -> bytes:
    return _TWO.pack(slot, len(ids)) + _words(ids)


def _ask(message: Ask) -> bytes:
    shape = (message.slots, message.width, message.rows, len(message.texts), int(message.sampling is not None))
    found = _FIVE.pack(*shape) + _words(message.numbers)
    if message.sampling is not None:
        knobs = flat(message.sampling.knobs.tolist())
        found += _words(flat(message.sampling.keys.tolist())) + struct.pack(f"<{len(knobs)}f", *knobs)
    return found + b"".join([_text(slot, ids) for slot, ids in message.texts])


# ---- reading


class _Cursor:
    """Reads a frame from front to back; every number is checked against what is left."""

    def __init__(self, frame: bytearray) -> None:
        self._frame, self._at = frame, _HEAD.size

    def pack(self, form: struct.Struct) -> tuple[int, ...]:
        values = form.unpack_from(self._frame, self._at)
        self._at += form.size
        return values

    def words(self, count: int) -> tuple[int, ...]:
        """The next ``count`` numbers."""
        self._enough(count)
        found = struct.unpack_from(f"<{count}i", self._frame, self._at)
        self._at += 4 * count
        return found

    def floats(self, count: int) -> tuple[float, ...]:
        """The next ``count`` numbers of 32 bits with fractions."""
        self._enough(count)
        made = struct.unpack_from(f"<{count}f", self._frame, self._at)
        self._at += 4 * count
        return made

    def _enough(self, count: int) -> None:
        if not 0 <= 4 * count <= len(self._frame) - self._at:
            raise ValueError(f"{count} words wanted, {(len(self._frame) - self._at) // 4} there")

    def text(self) -> tuple[int, tuple[int, ...]]:
        slot, length = self.pack(_TWO)
        return slot, self.words(length)

    def rest(self) -> str:
        found = self._frame[self._at :].decode()
        self._at = len(self._frame)
        return found

    def end(self) -> None:
        if self._at != len(self._frame):
            raise ValueError(f"{len(self._frame) - self._at} bytes too many")


def _read_ask(frame: bytearray, number: int) -> Ask:
    cursor = _Cursor(frame)
    slots, width, rows, texts, drawn = cursor.pack(_FIVE)
    if slots < 1 or width < 1:
        raise ValueError(f"a commit of {slots} slots, {width} wide")
    numbers = cursor.words(slots * (width + 3))
    sampling = _read_sampling(cursor, slots) if drawn else None
    read = tuple([cursor.text() for _ in range(texts)])
    cursor.end()
    return Ask(number, read, slots, width, numbers, rows, sampling)


def _read_sampling(cursor: _Cursor, slots: int) -> SamplingBatch:
    keys = torch.tensor(cursor.words(2 * slots), dtype=torch.int32).view(slots, 2)
    return SamplingBatch(torch.tensor(cursor.floats(4 * slots)).view(slots, 4), keys)


def _read_answer(frame: bytearray, number: int) -> Answer:
    cursor = _Cursor(frame)
    slots, nodes, ahead, _ = cursor.pack(_FOUR)
    if slots < 0 or nodes < 0:
        raise ValueError(f"a proposal of {slots} slots, {nodes} nodes")
    tokens = cursor.words(slots * nodes)
    cursor.end()
    return Answer(number, slots, nodes, tokens, bool(ahead))


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
