"""Frames over a socket: AF_UNIX within a machine, TCP between machines, both with a shared secret.

A frame is a length in 4 bytes followed by its bytes. Each side proves that it knows the secret before a frame is read
(challenge and response with HMAC-SHA256). Frames themselves are neither signed nor encrypted: on TCP use a private
network. See also: the meaning of frames (`messages`).

A round through another process should not find cold CPU caches. After a pause of some milliseconds code and data are
evicted: the first Python and the first tensor operations take eight to ten times as long, which is most of the cost of
such a round. So a side that waits for a message does two things in ``wait`` that save this time:

- Shortly before the message is due, it repeats the same steps with the previous message (a rehearsal).
- It allocates the tensors for the message. Numbers are then copied into existing memory.

This saves a third of the cost of such a round (docs/results.md).
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import TypeVar

from paceline.core.errors import ChannelError, ConfigurationError
from paceline.core.types import Commit, Proposal, RoundLimits
from paceline.placement.host.environment import private
from paceline.placement.remote import messages

_LENGTH = struct.Struct("<I")
_MAX_FRAME = 64 << 20  # bytes in a frame; a prompt of a million ids is 4 MiB
_READ = 1 << 16
_NONCE = 32
_AUTHENTICATION_S = 5.0
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
    """One connection. A frame that arrives late is kept until it is complete: no deadline cuts it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if option := getattr(socket, name, None):  # Linux has them all
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket, self._buffer = connection, bytearray()
        self._space = memoryview(bytearray(_READ))
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes, seconds: float) -> None:
        """Write a frame. ChannelError: the other side is gone or did not read it in time: close it then."""
        data = _LENGTH.pack(len(frame)) + frame
        try:
            sent = self._socket.send(data)  # nearly always all of it
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise ChannelError(f"the connection is lost ({error}); see the peer's log") from error
        if sent < len(data):
            self._write(data[sent:], monotonic() + seconds)

    def receive(self, seconds: float) -> bytearray | None:
        """Return the next frame; None if it does not arrive in time: call again. ChannelError: the peer is gone."""
        frame = self._cut() if self._buffer else None
        end = monotonic() + seconds
        while frame is None and self._readable.poll(max(0.0, end - monotonic()) * 1000):
            frame = self._next()
        return frame

    def wait(self, milliseconds: int) -> None:
        self._readable.poll(milliseconds)

    def arrived(self) -> list[bytearray]:
        """Return every complete frame that has arrived, after one read of the socket and without waiting."""
        frame = self._next()
        frames = [] if frame is None else [frame]
        while self._buffer and (frame := self._cut()) is not None:
            frames.append(frame)
        return frames

    def peer(self) -> int | None:
        """Return the pid at the other end, if the kernel knows it (AF_UNIX)."""
        if self._socket.family != socket.AF_UNIX:
            return None
        pid, _, _ = struct.unpack("iII", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def close(self) -> None:
        self._socket.close()

    def authenticate(self, secret: bytes, *, server: bool) -> None:
        """Prove that this side knows the secret, and check that the other one does. SilentError: it sends nothing."""
        end = monotonic() + _AUTHENTICATION_S
        own_role, other_role = (b"drafter", b"target") if server else (b"target", b"drafter")
        nonce = secrets.token_bytes(_NONCE)
        self._write(nonce, end)
        challenge = self._read_exactly(_NONCE, end)
        self._write(hmac.digest(secret, own_role + challenge, "sha256"), end)
        if not hmac.compare_digest(self._read_exactly(32, end), hmac.digest(secret, other_role + nonce, "sha256")):
            raise ChannelError("the peer does not have the shared secret; start both processes with the same one")

    def _read_exactly(self, size: int, end: float) -> bytes:
        data = b""
        while len(data) < size:
            if not self._readable.poll(max(0.0, end - monotonic()) * 1000):
                raise SilentError("the peer did not authenticate in time; see its log")
            try:
                more = self._socket.recv(size - len(data))
            except OSError as error:
                raise ChannelError(f"the connection is lost ({error}); see the peer's log") from error
            if not more:
                raise ChannelError("the peer closed the connection; see its log")
            data += more
        return data

    def _write(self, data: bytes, end: float) -> None:
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    if not self._writable.poll(max(0.0, end - monotonic()) * 1000):
                        raise ChannelError(
                            "the peer does not read its messages; check whether it is overloaded or suspended"
                        ) from None
        except OSError as error:
            raise ChannelError(f"the connection is lost ({error}); see the peer's log") from error

    def _next(self) -> bytearray | None:
        """Return a complete frame, after one read of the socket. A single one, the usual case, skips the buffer."""
        try:
            size = self._socket.recv_into(self._space)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            raise ChannelError(f"the connection is lost ({error}); see the peer's log") from error
        if not size:
            raise ChannelError("the peer closed the connection; see its log")
        data = self._space[:size]
        if not self._buffer and size > _LENGTH.size and _LENGTH.unpack_from(data)[0] == size - _LENGTH.size:
            return bytearray(data[_LENGTH.size :])
        self._buffer += data
        return self._cut()

    def _next_size(self) -> int:
        size = int(_LENGTH.unpack_from(self._buffer)[0])
        if size > _MAX_FRAME:
            raise ChannelError(
                f"expected frames of at most {_MAX_FRAME} bytes, got one of {size}; check that the peer is a "
                "paceline process"
            )
        return size + _LENGTH.size

    def _cut(self) -> bytearray | None:
        if len(self._buffer) < _LENGTH.size or len(self._buffer) < (size := self._next_size()):
            return None
        frame = self._buffer[_LENGTH.size : size]
        del self._buffer[:size]
        return frame


def connect(address: Address, secret: bytes, *, seconds: float) -> Channel:
    """Connect to a drafter. ChannelError: no response in time, or another secret; SilentError: it sends nothing."""
    connection = socket.socket(socket.AF_UNIX if address.path else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(address.path or (address.host, address.port))
        channel = Channel(connection)
        channel.authenticate(secret, server=False)
    except (OSError, ChannelError) as error:
        connection.close()
        kind = SilentError if isinstance(error, SilentError) else ChannelError
        raise kind(f"no drafter answers at {address} ({error})") from error
    return channel


def listen(address: Address) -> socket.socket:
    """Return a listening socket. A socket file is accessible to its owner only, and replaces a stale one."""
    listener = bind(address)
    listener.listen(BACKLOG)
    return listener


def bind(address: Address) -> socket.socket:
    """Return a socket that has the address and refuses connections until it listens, so that no other process takes the
    address while a model loads. WorkerError: the folder of the socket file can be changed by another user.
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


Events = TypeVar("Events")

_KEPT = 8  # pauses; the shortest of them counts, so that a rehearsal never delays a message that has arrived
_LEAD_S = 0.0009  # a rehearsal begins this long before the message is due; with 0.0004 it often delayed the message
_MIN_WAIT_MS = 1  # by then the other process has taken up what was sent to it, even on the same CPU


class DueTime:
    """Predicts when the next message is due, from the pauses before earlier ones."""

    def __init__(self) -> None:
        self._pauses: deque[float] = deque(maxlen=_KEPT)

    def observe(self, seconds: float) -> None:
        self._pauses.append(seconds)

    def milliseconds(self, elapsed: float = 0.0) -> int:
        """Return how long to wait before a rehearsal; ``elapsed``: seconds since the last message of the other side."""
        return max(_MIN_WAIT_MS, int(1000 * (min(self._pauses, default=0.0) - _LEAD_S - elapsed)))


class _IntBuffer:
    """Int32 tensor of a given shape, whose numbers are written later, once."""

    def __init__(self, *shape: int) -> None:
        import torch

        self.tensor = torch.empty(shape, dtype=torch.int32)
        self._memory = self.tensor.view(-1).numpy().data

    def fill(self, numbers: memoryview) -> None:
        self._memory[:] = numbers


class CommitBuffer:
    """Buffer for a commit [B, W] and its limits [B], whose numbers are written later."""

    def __init__(self, slots: int, width: int) -> None:
        self.shape = slots, width
        size = slots * width
        self._buffer = _IntBuffer(slots * (width + 3))
        numbers = self._buffer.tensor
        count, first_row, _ = numbers[size:].view(3, slots).unbind()
        self._commit = Commit(numbers[:size].view(slots, width), count, first_row)

    def fill(self, request: messages.ProposeRequest) -> tuple[Commit, RoundLimits]:
        numbers = messages.unpack_words(request.numbers)
        self._buffer.fill(numbers)
        return self._commit, RoundLimits(numbers[-self.shape[0] :].tolist(), request.max_rows)


class ReplyWarmer:
    """Target side: waits for proposals of one shape [B, N], and makes tensors of them."""

    def __init__(self, slots: int, num_draft_tokens: int) -> None:
        self._shape = slots, num_draft_tokens
        self._due = DueTime()
        self._buffer = _IntBuffer(*self._shape)
        self._last: bytearray | None = None  # the frame of the last proposal

    def wait(self, channel: Channel, timeout: float) -> None:
        """Wait until a reply is nearly due or has arrived, up to ``timeout`` seconds."""
        channel.wait(min(self._due.milliseconds(), int(1000 * timeout)))

    def rehearse(self) -> None:
        self._buffer = _IntBuffer(*self._shape)
        if self._last is not None:
            reply = messages.decode_reply(self._last)
            assert isinstance(reply, messages.ProposeReply)
            self._buffer.fill(messages.unpack_words(reply.tokens))

    def proposal(self, frame: bytearray, reply: messages.ProposeReply, *, seconds: float) -> Proposal:
        """Return the reply as a proposal; it arrived ``seconds`` after its request. ``frame``: as received."""
        self._buffer.fill(messages.unpack_words(reply.tokens))
        self._last = frame
        self._due.observe(seconds)
        return Proposal(self._buffer.tensor)


class RequestWarmer:
    """Drafter side of one target: waits for its next round, and makes a commit of it.

    ``encode`` turns a request's number and a proposal into the reply's bytes; a rehearsal does that too.
    """

    def __init__(self, encode: Callable[[int, Proposal], bytes]) -> None:
        self._encode = encode
        self._due = DueTime()
        self._buffer: CommitBuffer | None = None  # ready for the next request
        self._last: tuple[CommitBuffer, Proposal, bytearray | None] | None = None
        self._replied_at = 0.0

    def wait(self, poll: Callable[[int], list[Events]], *, only_target: bool) -> list[Events]:
        """Wait until ``poll`` (milliseconds; -1: no limit) returns events; until then prepare for the next request.

        ``only_target``: there is no other target. Of several targets any may be next, and soon.
        """
        due = self._due.milliseconds(perf_counter() - self._replied_at) if only_target else _MIN_WAIT_MS
        if events := poll(due):
            return events
        self._rehearse()
        return poll(-1)

    def commit(self, request: messages.ProposeRequest) -> tuple[CommitBuffer, Commit, RoundLimits]:
        """Return the commit and the limits of a request, and the buffer that holds their tensors."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.shape != (request.slots, request.width):
            buffer = CommitBuffer(request.slots, request.width)
        return buffer, *buffer.fill(request)

    def prepared(self, buffer: CommitBuffer, proposal: Proposal, frame: bytearray | None) -> None:
        """Record the proposal for a request. ``frame``: the request, if the next one will be similar.

        Its tensors are kept until the target has its reply, so that it does not wait while they are freed.
        """
        self._last = buffer, proposal, frame

    def failed(self) -> None:
        """Discard a failed request; its steps are not repeated."""
        self._last = None

    def replied(self, pause: float) -> None:
        """Record that the reply is sent; ``pause``: seconds from the last reply to this request (0: not known)."""
        self._replied_at = perf_counter()
        if pause:
            self._due.observe(pause)

    def _rehearse(self) -> None:
        if self._last is None:
            return
        (buffer, proposal, frame), self._last = self._last, None
        self._buffer = CommitBuffer(*buffer.shape)
        if frame is not None:
            request = messages.decode_request(frame)
            assert isinstance(request, messages.ProposeRequest)
            self._buffer.fill(request)
            self._encode(request.number, proposal)
