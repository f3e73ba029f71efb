"""Messages, channels and turns: what goes through comes out, and what is not a message is rejected."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.core.errors import ChannelError, ConfigurationError
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Commit, DraftShape, Proposal
from paceline.placement.host.processes import Process
from paceline.placement.remote import channel as channel_module
from paceline.placement.remote import messages, server
from paceline.placement.remote.channel import Address, Channel, CommitBuffer, DueTime, connect, listen
from paceline.placement.remote.server import UnpooledDrafters
from tests.placement.faulty import SECRET, serving
from tests.waiting import until


def propose(number: int, *, slots: int = 2, width: int = 3, **changes: object) -> messages.ProposeRequest:
    numbers = messages.pack_words(range(-1, slots * (width + 3) - 1))
    sampling = messages.SamplingWords.of(sampling_tensors([Sampling(0.5, seed=-3)] * slots))
    texts = ((1, (5, 0, 7)), (0, ()))
    fields = {"texts": texts, "numbers": numbers, "max_rows": 9, "sampling": sampling, **changes}
    return messages.ProposeRequest(number, slots=slots, width=width, **fields)  # type: ignore[arg-type]


REQUESTS: list[messages.TargetMessage] = [
    messages.Handshake(0, "chät", 4, 96),
    messages.AddRequest(1, 2, (0, 1, 95)),
    propose(2),
    propose(1 << 40, slots=1, width=1),
    propose(7, sampling=None, pause_us=1_000_000_000),
]
REPLIES: list[messages.Reply] = [
    messages.HandshakeReply(3, 4, None, Process(77, 2**31 - 1)),
    messages.HandshakeReply(3, 4, 128, Process(77, 0)),
    messages.ProposeReply(4, 2, 2, messages.pack_words([-1, 3, 2, 0]), True),
    messages.ProposeReply(4, 3, 0, messages.pack_words([]), False),
    messages.ErrorReply(5, "no, nö"),
]
MESSAGES = [*((one, messages.decode_request) for one in REQUESTS), *((one, messages.decode_reply) for one in REPLIES)]


@pytest.mark.parametrize(("message", "decode"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_round_trips(message: object, decode: Callable[[bytearray], object]) -> None:
    assert decode(bytearray(messages.encode(message))) == message  # type: ignore[arg-type]


def test_sampling_parameters_round_trip() -> None:
    sampling = sampling_tensors([Sampling(0.5, top_k=3, seed=-3), Sampling()])
    again = messages.SamplingWords.of(sampling).tensors()
    assert torch.equal(again.params, sampling.params) and torch.equal(again.seeds, sampling.seeds)
    assert again.kind == sampling.kind == "top-k"


@pytest.mark.parametrize(("slots", "width"), [(1, 5), (4, 2)])
def test_a_round_round_trips(slots: int, width: int) -> None:
    dice = torch.Generator().manual_seed(slots)
    tokens, *rest = (
        torch.randint(-1, 1 << 30, shape, generator=dice, dtype=torch.int32)
        for shape in ((slots, width), *[(slots,)] * 3)
    )
    numbers = memoryview(torch.cat((tokens.view(-1), *rest)).numpy().tobytes())
    commit, limits = CommitBuffer(slots, width).fill(
        propose(1, slots=slots, width=width, numbers=numbers, max_rows=7, sampling=None)
    )
    assert all(map(torch.equal, (commit.tokens, commit.count, commit.first_row), (tokens, *rest[:2])))
    assert limits.max_accept == rest[2].tolist() and limits.max_rows == 7 and commit.count.dtype == torch.int32


def test_damaged_messages_are_rejected_without_side_effects() -> None:
    dice = random.Random(3)
    for _ in range(3000):
        message, decode = dice.choice(MESSAGES)
        frame = bytearray(messages.encode(message))
        for _ in range(dice.randrange(1, 4)):
            change = dice.randrange(3)
            if change == 0 and frame:
                frame[dice.randrange(len(frame))] = dice.randrange(256)
            elif change == 1:
                del frame[dice.randrange(len(frame) + 1) :]
            else:
                frame += dice.randbytes(dice.randrange(8))
        with suppress(ChannelError):
            decode(frame)
    whole = messages.encode(propose(1))
    for frame in (bytearray(), bytearray(b"\x02" + b"\0" * 20), bytearray(whole + b"0000"), bytearray(whole[:-1])):
        with pytest.raises(ChannelError, match="could not be decoded"):
            messages.decode_request(frame)


@pytest.mark.parametrize(
    "changes",
    [
        {"numbers": messages.pack_words([1])}, {"slots": 0}, {"width": 0}, {"max_rows": -1}, {"pause_us": 1 << 40},
        {"texts": ((-1, ()),)}, {"sampling": messages.SamplingWords(memoryview(b""), memoryview(b""))},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_contradictory_request_is_rejected(changes: dict[str, object]) -> None:
    """Built on the wire by a side that checks nothing: the sizes of what follows are taken from these numbers."""
    good = propose(1)
    fields = ["propose", *(changes.get(name, getattr(good, name)) for name in good.__struct_fields__)]
    frame = bytearray(msgspec.msgpack.encode(fields))
    with pytest.raises(ChannelError, match="could not be decoded"):
        messages.decode_request(frame)


def test_another_version_or_kind_is_rejected() -> None:
    other = msgspec.msgpack.encode(["handshake", 0, "a", 1, 96, messages.VERSION + 1])
    for frame, decode, says in (
        (other, messages.decode_request, "same version of paceline"),
        (messages.encode(REQUESTS[0]), messages.decode_reply, "could not be decoded"),
        (messages.encode(REPLIES[0]), messages.decode_request, "could not be decoded"),
    ):
        with pytest.raises(ChannelError, match=says):
            decode(bytearray(frame))


def test_addresses_round_trip() -> None:
    for text in ("unix:/tmp/a b", "tcp:10.0.0.1:99", "tcp:::1:5"):
        assert str(Address.parse(text)) == text
    for text in ("", "unix:", "tcp:host", "tcp:host:port", "tcp:host:\u00b2", "tcp:host:65536", "http://x"):
        with pytest.raises(ConfigurationError, match="address: expected unix:/path/of/socket or tcp:host:port, got"):
            Address.parse(text)


def pair(stack: ExitStack) -> tuple[Channel, socket.socket]:
    one, other = socket.socketpair()
    stack.enter_context(other)
    return stack.enter_context(closing(Channel(one))), other


def test_a_deadline_does_not_split_a_frame(stack: ExitStack) -> None:
    here, raw = pair(stack)
    frame = messages.encode(REQUESTS[2])
    data = len(frame).to_bytes(4, "little") + frame
    for at in range(len(data) - 1):
        raw.send(data[at : at + 1])
        assert here.receive(0) is None and not here.arrived()
    raw.send(data[-1:] + data)
    assert here.arrived() == [frame, frame] and here.receive(0) is None
    raw.send((1 << 31).to_bytes(4, "little"))
    with pytest.raises(ChannelError, match="check that the peer is a paceline process"):
        here.receive(0)


def test_a_peer_that_does_not_read_is_dropped(stack: ExitStack) -> None:
    here, _ = pair(stack)
    with pytest.raises(ChannelError, match="does not read"):
        here.send(bytes(8 << 20), 0.05)


class Slow(Drafter):
    """Proposes zeros, and takes its time."""

    def __init__(self, seconds: float) -> None:
        self.draft_shape, self._seconds = DraftShape.chain(2), seconds

    def propose(self, commit: Commit, sampling: object, bounds: object) -> Proposal:
        time.sleep(self._seconds)
        return Proposal(torch.zeros(len(commit.tokens), 2, dtype=torch.int32))


def slow(address: Address) -> AbstractContextManager[None]:
    """Two milliseconds a proposal for every id of the target's vocabulary."""
    return serving(listen(address), UnpooledDrafters(lambda handshake: Slow(0.002 * handshake.vocab_size)))


def connected(stack: ExitStack, address: Address, name: str, *, cost: int = 1) -> tuple[Channel, messages.Reply]:
    channel = stack.enter_context(closing(connect(address, SECRET, seconds=5)))
    channel.send(messages.encode(messages.Handshake(0, name, 2, cost)), 1)
    frame = channel.receive(5)
    assert frame is not None
    return channel, messages.decode_reply(frame)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_unauthenticated_peer_is_not_served(tmp_path: Path, stack: ExitStack, kind: str) -> None:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port = link.getsockname()[1]
    address = Address(path=str(tmp_path / "s")) if kind == "unix" else Address(host="127.0.0.1", port=port)
    with slow(address):
        with pytest.raises(ChannelError, match="secret"):
            connect(address, b"another", seconds=5)
        rude = stack.enter_context(socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET))
        rude.connect(address.path or (address.host, address.port))
        rude.send(b"GET / HTTP/1.1\r\n\r\n" + bytes(90))  # nobody waits for this one
        channel, reply = connected(stack, address, "a")
        assert isinstance(reply, messages.HandshakeReply) and (channel.peer() is None) == (kind == "tcp")
        channel.send(messages.encode(messages.ErrorReply(1, "not a request")), 1)
        with pytest.raises(ChannelError, match="the peer closed the connection"):
            channel.receive(5)


def test_targets_are_served_in_fair_turns(tmp_path: Path, stack: ExitStack) -> None:
    """A target that asks without pause, and whose drafts cost more, gets its share of the time and no more."""
    address = Address(path=str(tmp_path / "s"))
    with slow(address):
        costs = {"a": 4, "b": 1}
        channels = {name: connected(stack, address, name, cost=cost)[0] for name, cost in costs.items()}
        done, sent = dict.fromkeys(channels, 0), dict.fromkeys(channels, 0)
        for name, channel in channels.items():
            for _ in range(60):
                sent[name] += 1
                channel.send(messages.encode(propose(sent[name])), 1)
        while sum(done.values()) < 50:
            for name, channel in channels.items():
                while (frame := channel.receive(0.001)) is not None:
                    reply = messages.decode_reply(frame)
                    assert isinstance(reply, messages.ProposeReply) and reply.number == done[name] + 1  # in order
                    done[name] += 1
        time_of = {name: done[name] * costs[name] for name in done}
        assert 0.4 < time_of["a"] / time_of["b"] < 2.5, done


class Fickle(Slow):
    """Proposes zeros in the first rounds, then an invalid proposal once, then zeros again."""

    def __init__(self, bad: Proposal) -> None:
        super().__init__(0.0)
        self._bad, self._asked = bad, 0

    def propose(self, commit: Commit, sampling: object, bounds: object) -> Proposal:
        self._asked += 1
        return self._bad if self._asked == 3 else super().propose(commit, sampling, bounds)


@pytest.mark.parametrize(
    "bad",
    [
        Proposal(torch.zeros(2, 2)),
        Proposal(torch.full((2, 2), 1 << 40)),
        Proposal(torch.zeros(2, 2, dtype=torch.int32), None, torch.zeros(2, 2, 5)),
        Proposal(torch.zeros(0, 2, dtype=torch.int32)),
    ],
    ids=["floats", "too large", "drawn", "of no slot"],
)
def test_a_drafter_that_fails_in_a_round_is_called_again(tmp_path: Path, stack: ExitStack, bad: Proposal) -> None:
    """Leftovers of a failed round are not read when the next one is prepared."""
    address = Address(path=str(tmp_path / "s"))
    with serving(listen(address), UnpooledDrafters(lambda _: Fickle(bad))):
        channel, _ = connected(stack, address, "a")
        kinds = []
        for number in range(1, 7):
            first = {} if number == 1 else {"sampling": None}
            usual = propose(number, width=3 if number < 5 else 4, texts=(), pause_us=1, **first)
            channel.send(messages.encode(usual), 1)
            frame = channel.receive(5)
            assert frame is not None
            kinds.append(type(messages.decode_reply(frame)))
            time.sleep(0.02)  # so that the server prepares for the next round
        assert kinds == [messages.ProposeReply] * 2 + [messages.ErrorReply] + [messages.ProposeReply] * 3


def test_unauthenticated_connections_are_limited_and_block_no_target(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection has a thread until it is authenticated, so their number is limited; later ones are
    rejected at once.
    """
    monkeypatch.setattr(server, "_MAX_STRANGERS", 2)
    monkeypatch.setattr(channel_module, "_AUTHENTICATION_S", 0.5)
    address = Address(path=str(tmp_path / "s"))
    with slow(address):
        before = threading.active_count()
        for _ in range(6):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(address.path)
        with pytest.raises(ChannelError):
            connect(address, SECRET, seconds=5)
        assert threading.active_count() <= before + 2

        def served() -> bool:
            with suppress(ChannelError):
                return isinstance(connected(stack, address, "a")[1], messages.HandshakeReply)
            return False

        until(served, 20, what="their time is over, and nobody else is served")


def test_a_lost_machine_is_detected(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    side = socket.create_connection(listener.getsockname())
    stack.enter_context(closing(Channel(side)))
    assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, count = (
        side.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
    )
    assert idle + interval * count <= 60


def test_the_next_request_is_expected_slightly_before_the_shortest_recent_pause() -> None:
    due = DueTime()
    assert due.milliseconds() == 1, "nothing is known"
    for seconds in (0.0201, 0.0053, 0.0302):
        due.observe(seconds)
    assert due.milliseconds() == 4 and due.milliseconds(0.0021) == 2 and due.milliseconds(0.5) == 1
    for _ in range(8):
        due.observe(0.0302)
    assert due.milliseconds() == 29, "what was long ago is forgotten"
    due.observe(0.0002)
    assert due.milliseconds() == 1
