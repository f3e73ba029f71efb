"""The messages between a target and its drafter: ids and counts as 32-bit words, one message each way a round.

Requests (target to drafter): Hello, Admit, Ask. Replies: Welcome, Answer, Failure. No pickle: what comes from a socket
is never run. Not here: sockets (`channel`), and tensors (`blanks`) but for how a batch samples.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from paceline.core.errors import ChannelError
from paceline.core.types import SamplingTensors
from paceline.placement.host.processes import Process
from paceline.placement.remote.blanks import flat

VERSION = 2
_HEAD = struct.Struct("<BBHq")  # version, kind, nothing (so that words are aligned), number of the message
_SAID = struct.Struct("<BBHqiii")  # the head and the shape of an Answer, in one go
_ROUND = struct.Struct("<BBHqiiiiii")  # and of an Ask
_WORD = 4  # bytes
Words = list[int] | memoryview
"""Numbers of 32 bits: a list where they are written, memory of the frame (format "i") where they are read."""
_HELLO, _ADMIT, _ASK, _WELCOME, _ANSWER, _FAILURE = range(1, 7)


@dataclass(frozen=True, slots=True)
class Handshake:
    """A target introduces itself. ``slots`` B of its batch, ``vocab_size`` V of its ids."""

    number: int
    client: str
    slots: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class HandshakeReply:
    """The drafter's reply. ``nodes`` N of its proposals; ``reach`` positions it follows, None = all; its process."""

    number: int
    nodes: int
    reach: int | None
    process: Process


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A request took a slot; its prompt. Not answered."""

    number: int
    slot: int
    text: tuple[int, ...]


class ProposeRequest(NamedTuple):
    """A round: read these texts anew (slot, ids), then propose what follows the commit.

    slots, width  B and W of the commit
    numbers       its tokens row by row, its counts, its starts, and the limits of the round: B * (W + 3)
    rows          of `Bounds`
    sampling      None: as in the last Ask; it changes only when a request comes or goes
    pause         microseconds since the target had the last answer; 0 = the texts did not simply go on
    """

    number: int
    texts: tuple[tuple[int, tuple[int, ...]], ...]
    slots: int
    width: int
    numbers: Words
    rows: int
    sampling: SamplingTensors | None
    pause: int = 0


class ProposeReply(NamedTuple):
    """A proposal: its ``tokens`` row by row, B * N of them. ``ahead``: it was ready before it was asked."""

    number: int
    slots: int
    nodes: int
    tokens: Words
    ahead: bool


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The drafter could not serve the message of that number."""

    number: int
    reason: str


Request = Handshake | AddRequest | ProposeRequest
Reply = HandshakeReply | ProposeReply | ErrorReply


def encode(message: Request | Reply) -> bytes:
    """A message as bytes."""
    if isinstance(message, ProposeRequest):
        number, texts, slots, width, numbers, rows, sampling, pause = message
        shape = slots, width, rows, len(texts), sampling is not None, pause
        found = _asking(len(numbers)).pack(VERSION, _ASK, 0, number, *shape, *numbers)
        return found if sampling is None and not texts else found + _rarely(message)
    if isinstance(message, ProposeReply):
        number, slots, nodes, tokens, ahead = message
        return _saying(len(tokens)).pack(VERSION, _ANSWER, 0, number, slots, nodes, ahead, *tokens)
    if isinstance(message, AddRequest):
        return _packed(_ADMIT, message.number, [message.slot, len(message.text), *message.text])
    if isinstance(message, Handshake):
        return _packed(_HELLO, message.number, [message.slots, message.vocab_size]) + message.client.encode()
    if isinstance(message, HandshakeReply):
        reach = -1 if message.reach is None else message.reach
        return _packed(_WELCOME, message.number, [message.nodes, reach, message.process.pid, message.process.began])
    return _packed(_FAILURE, message.number, []) + message.reason.encode()


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


@cache
def _asking(count: int) -> struct.Struct:
    return struct.Struct(f"{_ROUND.format}{count}i")


@cache
def _saying(count: int) -> struct.Struct:
    return struct.Struct(f"{_SAID.format}{count}i")


def _packed(kind: int, number: int, numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<BBHq{len(numbers)}i", VERSION, kind, 0, number, *numbers)


def _rarely(message: ProposeRequest) -> bytes:
    """What only the first rounds of a request have."""
    found: list[int] = []
    sampling = message.sampling
    if sampling is not None:
        found += flat(sampling.seeds.tolist()) + flat(sampling.params.view(torch.int32).tolist())
    for slot, ids in message.texts:
        found += [slot, len(ids), *ids]
    return struct.pack(f"<{len(found)}i", *found)


# ---- reading


def _numbers(frame: bytearray, start: int) -> tuple[int, ...]:
    """The words of a frame from there on, which must be whole."""
    count, over = divmod(len(frame) - start, _WORD)
    if over:
        raise ValueError(f"{over} bytes too many")
    return struct.unpack_from(f"<{count}i", frame, start)


def _part(found: tuple[int, ...], at: int, count: int) -> tuple[int, ...]:
    """So many words from there on, which must be there."""
    if not 0 <= count <= len(found) - at:
        raise ValueError(f"{count} words wanted, {len(found) - at} there")
    return found[at : at + count]


def _read_ask(frame: bytearray, number: int) -> ProposeRequest:
    *_, slots, width, rows, count, drawn, pause = _ROUND.unpack_from(frame)
    end = _ROUND.size + _WORD * slots * (width + 3)
    if slots < 1 or width < 1 or end > len(frame):
        raise ValueError(f"a commit of {slots} slots, {width} wide, in {len(frame)} bytes")
    ask = ProposeRequest(number, (), slots, width, memoryview(frame)[_ROUND.size : end].cast("i"), rows, None, pause)
    if end == len(frame) and not drawn and not count:
        return ask
    return _read_rarely(ask, _numbers(frame, end), texts=count, drawn=bool(drawn))


def _read_rarely(ask: ProposeRequest, found: tuple[int, ...], *, texts: int, drawn: bool) -> ProposeRequest:
    at, sampling, read = 0, None, []
    if drawn:
        at = 6 * ask.slots
        sampling = _read_sampling(_part(found, 0, at), ask.slots)
    for _ in range(texts):
        slot, size = _part(found, at, 2)
        read.append((slot, _part(found, at + 2, size)))
        at += 2 + size
    _all_read(found, at)
    return ask._replace(texts=tuple(read), sampling=sampling)


def _read_sampling(found: tuple[int, ...], slots: int) -> SamplingTensors:
    both = torch.tensor(found, dtype=torch.int32)
    return SamplingTensors(both[2 * slots :].view(torch.float32).view(slots, 4), both[: 2 * slots].view(slots, 2))


def _all_read(found: tuple[int, ...], at: int) -> None:
    if at != len(found):
        raise ValueError(f"{len(found) - at} words too many")


def _read_answer(frame: bytearray, number: int) -> ProposeReply:
    *_, slots, nodes, ahead = _SAID.unpack_from(frame)
    if slots < 0 or nodes < 0 or len(frame) != _SAID.size + _WORD * slots * nodes:
        raise ValueError(f"a proposal of {slots} slots, {nodes} nodes, in {len(frame)} bytes")
    return ProposeReply(number, slots, nodes, memoryview(frame)[_SAID.size :].cast("i"), bool(ahead))


def _read_admit(frame: bytearray, number: int) -> AddRequest:
    slot, size, *text = _numbers(frame, _HEAD.size)
    if size != len(text):
        raise ValueError(f"a text of {size} ids, and {len(text)} are there")
    return AddRequest(number, slot, tuple(text))


def _read_hello(frame: bytearray, number: int) -> Handshake:
    slots, vocab_size = struct.unpack_from("<ii", frame, _HEAD.size)
    return Handshake(number, frame[_HEAD.size + 2 * _WORD :].decode(), slots, vocab_size)


def _read_welcome(frame: bytearray, number: int) -> HandshakeReply:
    nodes, reach, pid, began = _numbers(frame, _HEAD.size)
    return HandshakeReply(number, nodes, None if reach < 0 else reach, Process(pid, began))


def _read_failure(frame: bytearray, number: int) -> ErrorReply:
    return ErrorReply(number, frame[_HEAD.size :].decode())


_READERS: dict[int, Callable[[bytearray, int], Request | Reply]] = {
    _HELLO: _read_hello,
    _ADMIT: _read_admit,
    _ASK: _read_ask,
    _WELCOME: _read_welcome,
    _ANSWER: _read_answer,
    _FAILURE: _read_failure,
}
