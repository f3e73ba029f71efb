"""HTTP without Ray Serve's proxy, for a service whose ingress process runs on the machine of its launcher.

A request through the proxy costs the proxy and the ingress process more than the ingress needs to serve it directly
(docs/decisions/0019). So the ingress process accepts connections itself (`serving`), at a socket that it gets from the
launcher (`ListeningSocket`, `receive_socket`). The launcher keeps the socket open: an address in use is an error before
anything starts, and while an ingress process is replaced, connections wait and are not rejected. Several processes may
hold the socket; each connection is accepted by one of them.

The socket is passed through a socket file that only its owner can use (SCM_RIGHTS; Linux, unix(7)).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from paceline.core.errors import ConfigurationError, WorkerError
from paceline.placement.host import environment
from paceline.placement.remote import channel

_BACKLOG = 2048  # connections that wait to be accepted; uvicorn's default
_KEEP_ALIVE_S = 60.0  # for an idle connection: longer than clients keep theirs, which else find it closed
_RECEIVE_S = 10.0


class ListeningSocket:
    """Address of a service, and a socket file at which processes of this user get the socket.

    ``handover``: path of the socket file. Connections wait until a process that received the socket listens.

    Raises:
        ConfigurationError: the address is not available.
        WorkerError: another user can change the folder of socket files.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = _bound(host, port)
        self.handover = str(environment.scratch() / "sockets" / f"http-{secrets.token_hex(4)}")
        try:
            self._gives = channel.listen(channel.Address(path=self.handover))
        except BaseException:
            self._socket.close()
            raise
        threading.Thread(target=self._give, name="paceline-http-socket", daemon=True).start()

    @property
    def port(self) -> int:
        """Port of the socket: the requested one, or with 0 a free one."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Close the socket. Connections are rejected once every process that received it has closed it, too."""
        with suppress(OSError):  # it is closed already
            self._gives.shutdown(socket.SHUT_RDWR)  # its thread ends
        self._gives.close()
        Path(self.handover).unlink(missing_ok=True)
        self._socket.close()

    def __enter__(self) -> ListeningSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, _ = self._gives.accept()
                with connection, suppress(OSError):  # of a process that has ended
                    socket.send_fds(connection, [b"\0"], [self._socket.fileno()])


def receive_socket(handover: str) -> socket.socket:
    """Receive the socket of `ListeningSocket`, in a process of the same user on the same machine.

    Raises:
        WorkerError: no process provides it.
    """
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_RECEIVE_S)
            connection.connect(handover)
            _, (number,), _, _ = socket.recv_fds(connection, 1, 1)
    except (OSError, ValueError) as error:
        raise WorkerError(
            f"the process that started the service did not report its address ({error}); start the service again"
        ) from error
    return socket.socket(fileno=number)


@asynccontextmanager
async def serving(app: ASGIApp, listening: socket.socket, *, drain_s: float) -> AsyncIterator[None]:
    """Serve connections to ``listening`` with ``app`` during the block. Then no more are accepted, and current
    responses have ``drain_s`` seconds to end. The caller runs ``app``'s lifespan.

    Raises:
        OSError: another socket listens at the address: two services that start at the same moment both have it.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        log_level=None,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(_KEEP_ALIVE_S),
        timeout_graceful_shutdown=round(drain_s),
    )
    server = _Server(config)
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if running.done():
        listening.close()
        await running
    try:
        yield
    finally:
        server.should_exit = True
        await running


class _Server(uvicorn.Server):
    """Server that leaves signals to its process."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigurationError(
            f"--port: cannot listen on {host}:{port} ({error}); choose another --host or --port, or stop the "
            "process that uses it"
        ) from error
    return listening
