"""Protocol of a target and its drafter: addresses, messages in msgpack, and a channel for the bytes.

A channel is a `multiprocessing.connection.Connection` over a socket: AF_UNIX within a machine, TCP between machines.
Each side proves that it knows the secret before a message is read. Messages are neither signed nor encrypted: on TCP
use a private network.

A round is one message in each direction. Requests (target to drafter): Handshake, AddRequest, ProposeRequest. Replies:
HandshakeReply, ProposeReply, ErrorReply. Decoding is strict: an unknown kind, a missing or additional field, a wrong
type or size is a ChannelError. Received data is never unpickled: a connection's ``send`` and ``recv`` are not used.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from paceline.core.errors import ChannelError, ConfigurationError
from paceline.core.sampling import kind_of_params
from paceline.core.types import Commit, RoundLimits, SamplingTensors
from paceline.placement.host.environment import private
from paceline.placement.host.processes import Process

if TYPE_CHECKING:
    from torch import Tensor

VERSION: Literal[4] = 4
MAX_PAUSE_US = 1_000_000_000

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_WORD = 4  # bytes


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Message with the ``number`` of a request, which its reply repeats."""

    number: Number


class Handshake(_Message, frozen=True, tag="handshake"):
    """Introduction of a target: its name, the B slots of its batch, the V ids of its vocabulary."""

    target: str
    slots: Positive
    vocab_size: Positive
    version: Literal[4] = VERSION


class HandshakeReply(_Message, frozen=True, tag="handshake-reply"):
    """Drafter's offer: N tokens per round, the positions it follows (None: all), and its process."""

    num_draft_tokens: Natural
    max_positions: Natural | None
    process: Process
    version: Literal[4] = VERSION


class AddRequest(_Message, frozen=True, tag="add"):
    """Prompt of a request that takes a slot. Has no reply."""

    slot: Natural
    prompt: tuple[Natural, ...]


class SamplingWords(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """`SamplingTensors` as bytes: ``params`` float32 [B, 4], ``seeds`` int32 [B, 4]. They determine the mode."""

    params: memoryview
    seeds: memoryview

    @classmethod
    def of(cls, sampling: SamplingTensors) -> SamplingWords:
        """Return the bytes of these tensors."""
        return cls(*(memoryview(part.numpy().tobytes()) for part in (sampling.params, sampling.seeds)))

    def tensors(self) -> SamplingTensors:
        """Return the tensors of these bytes."""
        import torch

        params = torch.frombuffer(bytearray(self.params), dtype=torch.float32).view(-1, 4)
        seeds = words_tensor(self.seeds).view(-1, 4)
        return SamplingTensors(params, seeds, kind_of_params(params))


class ProposeRequest(_Message, frozen=True, tag="propose"):
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

    def commit(self) -> Commit:
        """Return the commit as tensors."""
        import torch

        slots, size, numbers = self.slots, self.slots * self.width, bytearray(self.numbers)
        tokens, count, first_row = (
            torch.frombuffer(numbers, dtype=torch.int32, count=length, offset=_WORD * start)
            for length, start in ((size, 0), (slots, size), (slots, size + slots))
        )
        return Commit(tokens.view(slots, self.width), count, first_row)

    def limits(self, used_slots: int | None) -> RoundLimits:
        """Return the round's limits."""
        return RoundLimits(unpack_words(self.numbers)[-self.slots :].tolist(), self.max_rows, used_slots=used_slots)


class ProposeReply(_Message, frozen=True, tag="propose-reply"):
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


class ErrorReply(_Message, frozen=True, tag="error"):
    """Reason why the drafter could not serve the message of that number."""

    reason: str


Request = Handshake | AddRequest | ProposeRequest
Reply = HandshakeReply | ProposeReply | ErrorReply

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Encode a message as bytes."""
    return _ENCODER.encode(message)


def decode_request(message: bytes) -> Request:
    """Decode the request in these bytes.

    Raises:
        ChannelError: the bytes are not a request.
    """
    try:
        request: Request = _REQUESTS.decode(message)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _not_understood(message, error) from error
    return request


def decode_reply(message: bytes) -> Reply:
    """Decode the reply in these bytes.

    Raises:
        ChannelError: the bytes are not a reply.
    """
    try:
        reply: Reply = _REPLIES.decode(message)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _not_understood(message, error) from error
    return reply


def _not_understood(message: bytes, error: Exception) -> ChannelError:
    return ChannelError(
        f"a message of {len(message)} bytes could not be decoded ({error}); run the same version of paceline "
        "on both sides"
    )


def pack_words(numbers: Sequence[int]) -> memoryview:
    """Pack numbers as int32 for the fields ``numbers`` and ``tokens``.

    Raises:
        struct.error: a number does not fit in 32 bits.
    """
    return memoryview(_words(len(numbers)).pack(*numbers))


def unpack_words(data: memoryview) -> memoryview:
    """Return the numbers packed by `pack_words`, without copying them."""
    return data.cast("i")


def words_tensor(data: memoryview) -> Tensor:
    """Return the numbers packed by `pack_words` as an int32 tensor."""
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.int32)


@cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"={count}i")


_MAX_MESSAGE = 64 << 20  # bytes; a prompt of a million ids is 4 MiB
_AUTHENTICATION_S = 5.0
STALL_S = 5.0  # for the other side to read a message
_LAST_PORT = 65535
BACKLOG = 16  # connections that wait to be accepted
# A lost machine sends nothing: it is detected after 30 + 3 x 10 seconds of silence, not after hours.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a drafter: a socket file, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``unix:/path`` or ``tcp:host:port``."""
        kind, _, rest = text.partition(":")
        if kind == "unix" and rest:
            return cls(path=rest)
        host, _, port = rest.rpartition(":")
        if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT:
            return cls(host=host, port=int(port))
        raise ConfigurationError(f"address: expected unix:/path/of/socket or tcp:host:port, got {text!r}; correct it")


class SilentError(ChannelError):
    """A process accepts a connection and sends nothing; a running one responds at once, even if it is busy."""


class Channel:
    """Connection that carries bytes. Takes over the socket.

    stall_s  seconds to wait for a side that does not read; a message that has begun may take longer than its deadline,
             so that no deadline cuts it
    peer     pid at the other end, if the kernel knows it (AF_UNIX)
    """

    def __init__(self, link: socket.socket, stall_s: float = STALL_S) -> None:
        link.setblocking(True)
        self.peer: int | None = None
        if link.family == socket.AF_UNIX:
            self.peer = int(struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        else:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if option := getattr(socket, name, None):  # Linux has them all
                    link.setsockopt(socket.IPPROTO_TCP, option, value)
        for option, seconds in (socket.SO_SNDTIMEO, stall_s), (socket.SO_RCVTIMEO, _AUTHENTICATION_S):
            whole, part = divmod(round(seconds * 1e6) or 1, 1_000_000)  # zeros would mean: no limit
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, part))
        self._connection = Connection(link.detach())
        self._readable = select.poll()  # `Connection.poll` makes a new one each time
        self._readable.register(self._connection, select.POLLIN)

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, message: bytes) -> None:
        """Write a message.

        Raises:
            ChannelError: the other side is gone, or does not read; the channel can no longer be used.
        """
        try:
            self._connection.send_bytes(message)
        except BlockingIOError:
            raise ChannelError(
                "the peer does not read its messages; check whether it is overloaded or suspended"
            ) from None
        except OSError as error:
            raise ChannelError(f"the connection is lost ({error}); see the peer's log") from error

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message; None if none begins within ``seconds``. The call can then be repeated.

        Raises:
            ChannelError: see `read`.
        """
        return self.read() if self._readable.poll(max(0.0, seconds) * 1000) else None

    def read(self) -> bytes:
        """Return the next message, of which a part has arrived.

        Raises:
            ChannelError: the other side is gone, or sends something that is not a message.
        """
        try:
            return self._connection.recv_bytes(_MAX_MESSAGE)
        except EOFError:
            raise ChannelError("the peer closed the connection; see its log") from None
        except (OSError, ValueError) as error:
            raise ChannelError(
                f"the connection is lost ({error}); check that the peer is a paceline process"
            ) from error

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._connection.close()

    def authenticate(self, secret: bytes, *, server: bool) -> None:
        """Prove that this side knows the secret, and check that the other one does.

        Raises:
            ChannelError: the other side does not know it; SilentError: it sends nothing.
        """
        steps: tuple[Callable[[Connection, bytes], None], ...] = (deliver_challenge, answer_challenge)
        try:
            for step in steps if server else reversed(steps):
                step(self._connection, secret)
        except BlockingIOError:
            raise SilentError("the peer did not authenticate in time; see its log") from None
        except EOFError:
            raise ChannelError("the peer closed the connection; see its log") from None
        except (AuthenticationError, AssertionError) as error:  # an assertion (Python 3.11): it sent no challenge
            raise ChannelError(
                "the peer does not have the shared secret; start both processes with the same one, and the same Python"
            ) from error
        except (OSError, ValueError) as error:  # a value: this Python has no such digest
            raise ChannelError(
                f"the peer cannot be authenticated ({error}); start both processes with the same Python"
            ) from error


def connect(address: Address, secret: bytes, *, seconds: float, stall_s: float = STALL_S) -> Channel:
    """Connect to a drafter within ``seconds``; ``stall_s``: see `Channel`.

    Raises:
        ChannelError: no response in time, or the secrets differ; SilentError: a process listens and sends nothing.
    """
    link = socket.socket(socket.AF_UNIX if address.path else socket.AF_INET, socket.SOCK_STREAM)
    channel = None
    try:
        link.settimeout(seconds)
        link.connect(address.path or (address.host, address.port))
        channel = Channel(link, stall_s)
        channel.authenticate(secret, server=False)
    except (OSError, ChannelError) as error:
        (channel or link).close()
        kind = SilentError if isinstance(error, SilentError) else ChannelError
        raise kind(f"no drafter answers at {address} ({error})") from error
    return channel


def listen(address: Address) -> socket.socket:
    """Return a listening socket. A socket file is accessible to its owner only, and replaces a stale one.

    Raises:
        ChannelError, WorkerError: see `bind`.
    """
    listener = bind(address)
    listener.listen(BACKLOG)
    return listener


def bind(address: Address) -> socket.socket:
    """Return a socket that has the address and refuses connections until it listens, so that no other process takes the
    address while a model loads.

    Raises:
        ChannelError: the address is not available.
        WorkerError: the folder of the socket file can be changed by another user.
    """
    if address.path:
        private(Path(address.path).parent)
    listener = socket.socket(socket.AF_UNIX if address.path else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if address.path:
            path = Path(address.path)
            path.unlink(missing_ok=True)
            listener.bind(address.path)
            path.chmod(0o600)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
    except OSError as error:
        listener.close()
        raise ChannelError(f"address: cannot listen at {address} ({error}); choose another one") from error
    return listener
