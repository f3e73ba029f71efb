"""Who connects to a drafter without being a target of it, and machines that go away without a word."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from paceline.core.errors import ChannelError
from paceline.placement.remote import channel as channel_module
from paceline.placement.remote import messages, server
from paceline.placement.remote.channel import Address, Channel, connect
from tests.placement.faulty import SECRET
from tests.placement.test_wire import connected, slow


def test_unauthenticated_connections_are_limited_and_block_no_target(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a thread until it has authenticated itself, so there may be so many; who comes later is told at once."""
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
        end = time.monotonic() + 20
        while True:  # their time is over
            try:
                _, reply = connected(stack, address, "a")
                break
            except ChannelError:
                assert time.monotonic() < end
        assert isinstance(reply, messages.HandshakeReply)


def test_a_machine_that_is_gone_is_noticed(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    side = socket.create_connection(listener.getsockname())
    stack.enter_context(closing(Channel(side)))
    assert side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, count = (
        side.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT")
    )
    assert idle + interval * count <= 60
