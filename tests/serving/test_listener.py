"""The socket of a service passes from its launcher to the processes of HTTP, and outlives them."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from starlette.types import Receive, Scope, Send

from paceline.core.errors import ConfigurationError, WorkerError
from paceline.serving.ray_app import ListeningSocket, receive_socket, serving
from tests.waiting import until

ANSWERS = """
import asyncio, sys
from paceline.serving.ray_app import receive_socket, serving

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": sys.argv[2].encode()})

async def main():
    async with serving(app, receive_socket(sys.argv[1]), drain_s=1):
        print("listens", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@contextmanager
def process(handover: str, text: str) -> Iterator[subprocess.Popen[str]]:
    """Answers ``text``; it listens when this returns, and is killed at the end."""
    line = [sys.executable, "-c", ANSWERS, handover, text]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None and started.stdout.readline() == "listens\n"
            yield started
        finally:
            started.kill()


def answer(url: str) -> bytes:
    with urlopen(url, timeout=60) as response:
        return bytes(response.read())


def test_connections_wait_while_the_http_process_is_replaced() -> None:
    with ListeningSocket("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listening.port}/"
        with pytest.raises(urllib.error.URLError, match="refused"):
            answer(url)  # nobody has received the socket
        with process(listening.handover, "first"):
            assert answer(url) == b"first"
        waits = pool.submit(answer, url)
        with process(listening.handover, "second"):
            assert waits.result(60) == b"second"
    with pytest.raises(urllib.error.URLError, match="refused"):
        answer(url)
    assert not Path(listening.handover).exists()


def test_an_unavailable_address_is_an_error_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"127.0.0.1:{port} .*choose another --host or --port"):
            ListeningSocket("127.0.0.1", port)
    for host, port in (("127.0.0.1", 1 << 16), ("192.0.2.1", 0)):  # no port; an address that no machine has
        with pytest.raises(ConfigurationError, match="choose another --host or --port, or stop the process that"):
            ListeningSocket(host, port)


def test_one_of_two_concurrent_services_fails() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def main(first: ListeningSocket, second: ListeningSocket) -> None:
        async with serving(app, receive_socket(first.handover), drain_s=1):
            with pytest.raises(OSError, match="in use"):
                await serving(app, receive_socket(second.handover), drain_s=1).__aenter__()

    with ListeningSocket("127.0.0.1", 0) as first, ListeningSocket("127.0.0.1", first.port) as second:
        asyncio.run(main(first, second))


def test_the_socket_file_is_private() -> None:
    with ListeningSocket("127.0.0.1", 0) as listening:
        file = Path(listening.handover)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_uid == os.getuid()
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        receive_socket(listening.handover).close()
    with pytest.raises(WorkerError, match="start the service again"):
        receive_socket(listening.handover)
    listening.close()  # again: nothing happens
    until(lambda: not any(thread.name == "paceline-http-socket" for thread in threading.enumerate()))


def test_running_responses_finish_and_no_more_start() -> None:
    async def main(listening: ListeningSocket) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def app(_: Scope, __: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            begun.set()
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"two"})

        url = f"http://127.0.0.1:{listening.port}/"
        served = serving(app, receive_socket(listening.handover), drain_s=30)
        await served.__aenter__()
        listening.close()
        answered = asyncio.ensure_future(asyncio.to_thread(answer, url))
        await begun.wait()
        ended = asyncio.ensure_future(served.__aexit__(None, None, None))
        await asyncio.sleep(0.3)
        assert not ended.done()
        with pytest.raises(urllib.error.URLError, match="refused"):
            await asyncio.to_thread(answer, url)
        go_on.set()
        assert await answered == b"onetwo"
        await ended

    with ListeningSocket("127.0.0.1", 0) as listening:
        asyncio.run(main(listening))
