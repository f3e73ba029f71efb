"""The messages between a target and its drafter, in msgpack: one message each way a round.

Requests (target to drafter): Handshake, AddRequest, ProposeRequest. Replies: HandshakeReply, ProposeReply, ErrorReply.
Decoding is strict: an unknown kind, a missing or additional field, a wrong type or size is a ChannelError, and nothing
that comes from a socket is ever run (no pickle). Not here: sockets and the size limit of a frame (`channel`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Literal

import msgspec

from paceline.core.errors import ChannelError
from paceline.core.sampling import kind_of_params
from paceline.core.types import SamplingTensors
from paceline.placement.host.processes import Process

VERSION: Literal[3] = 3
MAX_PAUSE_US = 1_000_000_000

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_WORD = 4  # bytes


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """``number`` of a request, which its reply repeats."""

    number: Number


class Handshake(_Message, frozen=True, tag="handshake"):
    """A target introduces itself: its name, the B slots of its batch, the V ids of its vocabulary."""

    target: str
    slots: Positive
    vocab_size: Positive
    version: Literal[3] = VERSION


class HandshakeReply(_Message, frozen=True, tag="handshake-reply"):
    """What the drafter offers: N tokens a round, the positions it follows (None = all), and which process it is."""

    num_draft_tokens: Natural
    max_positions: Natural | None
    process: Process
    version: Literal[3] = VERSION


class AddRequest(_Message, frozen=True, tag="add"):
    """A request took a slot; its prompt. There is no reply."""

    slot: Natural
    prompt: tuple[Natural, ...]


class SamplingWords(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`SamplingTensors` as bytes: ``params`` float32 [B, 4], ``seeds`` int32 [B, 4]. Their kind follows from them."""

    params: memoryview
    seeds: memoryview

    @classmethod
    def of(cls, sampling: SamplingTensors) -> SamplingWords:
        """The bytes of these tensors."""
        return cls(*(memoryview(part.numpy().tobytes()) for part in (sampling.params, sampling.seeds)))

    def tensors(self) -> SamplingTensors:
        """The tensors again."""
        import torch

        params = torch.frombuffer(bytearray(self.params), dtype=torch.float32).view(-1, 4)
        seeds = torch.frombuffer(bytearray(self.seeds), dtype=torch.int32).view(-1, 4)
        return SamplingTensors(params, seeds, kind_of_params(params))


class ProposeRequest(_Message, frozen=True, tag="propose"):
    """A round: read these sequences anew (slot, ids), then propose what follows the commit.

    slots, width  B and W of the commit
    numbers       int32: the commit's tokens row by row, its counts, its first rows, the round's limits; B * (W + 3)
    max_rows      of `RoundLimits`
    sampling      None = as in the last ProposeRequest; it changes only when a request comes or goes
    pause_us      microseconds since the target had the last reply; 0 = something else happened in between
    """

    texts: tuple[tuple[Natural, tuple[Natural, ...]], ...]
    slots: Positive
    width: Positive
    numbers: memoryview
    max_rows: Natural
    sampling: SamplingWords | None
    pause_us: Annotated[int, msgspec.Meta(ge=0, le=MAX_PAUSE_US)] = 0

    def __post_init__(self) -> None:
        slots, sampling = self.slots, self.sampling
        if len(self.numbers) != _WORD * slots * (self.width + 3):
            raise ValueError(f"{len(self.numbers)} bytes for a commit of {slots} slots, {self.width} wide")
        if sampling is not None and (len(sampling.params), len(sampling.seeds)) != (
            4 * _WORD * slots,
            4 * _WORD * slots,
        ):
            raise ValueError(f"sampling parameters that are not those of {slots} slots")


class ProposeReply(_Message, frozen=True, tag="propose-reply"):
    """A proposal: ``tokens`` int32 row by row, B * N of them. ``ahead``: it was ready before it was asked for."""

    slots: Natural
    num_draft_tokens: Natural
    tokens: memoryview
    ahead: bool

    def __post_init__(self) -> None:
        if len(self.tokens) != _WORD * self.slots * self.num_draft_tokens:
            raise ValueError(f"{len(self.tokens)} bytes for {self.slots} slots of {self.num_draft_tokens} tokens")


class ErrorReply(_Message, frozen=True, tag="error"):
    """The drafter could not serve the message of that number; why."""

    reason: str


Request = Handshake | AddRequest | ProposeRequest
Reply = HandshakeReply | ProposeReply | ErrorReply

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """A message as bytes."""
    return _ENCODER.encode(message)


def decode_request(frame: bytearray) -> Request:
    """The request in a frame.

    Raises:
        ChannelError: the bytes are not a request.
    """
    try:
        request: Request = _REQUESTS.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _not_understood(frame, error) from error
    return request


def decode_reply(frame: bytearray) -> Reply:
    """The reply in a frame.

    Raises:
        ChannelError: the bytes are not a reply.
    """
    try:
        reply: Reply = _REPLIES.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _not_understood(frame, error) from error
    return reply


def _not_understood(frame: bytearray, error: Exception) -> ChannelError:
    return ChannelError(
        f"a message of {len(frame)} bytes was not understood ({error}); run the same version of paceline on both sides"
    )


def pack_words(numbers: Sequence[int]) -> memoryview:
    """Numbers as int32 for the fields ``numbers`` and ``tokens``.

    Raises:
        struct.error: a number has no room in 32 bits.
    """
    return memoryview(_words(len(numbers)).pack(*numbers))


def unpack_words(data: memoryview) -> memoryview:
    """The numbers of such a field, without copying them."""
    return data.cast("i")


@cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"={count}i")
