"""Messages between a target and its drafter, in msgpack: one in each direction per round.

Requests (target to drafter): Handshake, AddRequest, ProposeRequest. Replies: HandshakeReply, ProposeReply, ErrorReply.
Decoding is strict: an unknown kind, a missing or additional field, a wrong type or size is a ChannelError, and no
received data is ever executed (no pickle). See also: sockets and the maximum frame size (`channel`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Literal, TypeVar

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


class _Numbered(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Message with the ``number`` of a request, which its reply repeats."""

    number: Number


class Handshake(_Numbered, frozen=True, tag="handshake"):
    """Introduction of a target: its name, the B slots of its batch, the V ids of its vocabulary."""

    target: str
    slots: Positive
    vocab_size: Positive
    version: Literal[3] = VERSION


class HandshakeReply(_Numbered, frozen=True, tag="handshake-reply"):
    """Drafter's offer: N tokens per round, the positions it follows (None: all), and its process."""

    num_draft_tokens: Natural
    max_positions: Natural | None
    process: Process
    version: Literal[3] = VERSION


class AddRequest(_Numbered, frozen=True, tag="add"):
    """Prompt of a request that takes a slot. Has no reply."""

    slot: Natural
    prompt: tuple[Natural, ...]


class SamplingWords(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`SamplingTensors` as bytes: ``params`` float32 [B, 4], ``seeds`` int32 [B, 4]. They determine the mode."""

    params: memoryview
    seeds: memoryview

    @classmethod
    def of(cls, sampling: SamplingTensors) -> SamplingWords:
        return cls(*(memoryview(part.numpy().tobytes()) for part in (sampling.params, sampling.seeds)))

    def tensors(self) -> SamplingTensors:
        import torch

        params = torch.frombuffer(bytearray(self.params), dtype=torch.float32).view(-1, 4)
        seeds = torch.frombuffer(bytearray(self.seeds), dtype=torch.int32).view(-1, 4)
        return SamplingTensors(params, seeds, kind_of_params(params))


class ProposeRequest(_Numbered, frozen=True, tag="propose"):
    """Request of a round: read these sequences again (slot, ids), then propose tokens after the commit.

    slots, width  B and W of the commit
    numbers       int32: the commit's tokens row by row, its counts, its first rows, the round's limits; B * (W + 3)
    max_rows      see `RoundLimits`
    sampling      None: as in the last ProposeRequest; it changes only when a request is added or removed
    pause_us      microseconds since the target had the last reply; 0: something else happened in between
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
            raise ValueError(
                f"numbers: expected a commit of {slots} slots of width {self.width}, got {len(self.numbers)} bytes; "
                "run the same version on both sides"
            )
        if sampling is not None and (len(sampling.params), len(sampling.seeds)) != (
            4 * _WORD * slots,
            4 * _WORD * slots,
        ):
            raise ValueError(
                f"sampling: expected parameters of {slots} slots, got others; run the same version on both sides"
            )


class ProposeReply(_Numbered, frozen=True, tag="propose-reply"):
    """Proposal: ``tokens`` int32 row by row, B * N of them. ``ahead``: it was ready before the request."""

    slots: Natural
    num_draft_tokens: Natural
    tokens: memoryview
    ahead: bool

    def __post_init__(self) -> None:
        if len(self.tokens) != _WORD * self.slots * self.num_draft_tokens:
            raise ValueError(
                f"tokens: expected {self.slots} slots of {self.num_draft_tokens} tokens, got {len(self.tokens)} "
                "bytes; run the same version on both sides"
            )


class ErrorReply(_Numbered, frozen=True, tag="error"):
    """Reason why the drafter could not serve the message of that number."""

    reason: str


TargetMessage = Handshake | AddRequest | ProposeRequest
Reply = HandshakeReply | ProposeReply | ErrorReply
Decoded = TypeVar("Decoded")

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[TargetMessage] = msgspec.msgpack.Decoder(TargetMessage)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: TargetMessage | Reply) -> bytes:
    return _ENCODER.encode(message)


def decode_request(frame: bytearray) -> TargetMessage:
    """Decode the request in a frame; ChannelError if the bytes are none."""
    return _decoded(frame, _REQUESTS)


def decode_reply(frame: bytearray) -> Reply:
    """Decode the reply in a frame; ChannelError if the bytes are none."""
    return _decoded(frame, _REPLIES)


def _decoded(frame: bytearray, decoder: msgspec.msgpack.Decoder[Decoded]) -> Decoded:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ChannelError(
            f"a message of {len(frame)} bytes could not be decoded ({error}); run the same version of paceline on "
            "both sides"
        ) from error


def pack_words(numbers: Sequence[int]) -> memoryview:
    """Pack numbers as int32 for the fields ``numbers`` and ``tokens``."""
    return memoryview(_words(len(numbers)).pack(*numbers))


def unpack_words(data: memoryview) -> memoryview:
    """Return the numbers packed by `pack_words`, without copying them."""
    return data.cast("i")


@cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"={count}i")
