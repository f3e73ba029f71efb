"""A draft server in a thread of the test's own process; no tests in here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.placement.remote.server import DrafterPool, DraftServer
from tests.placement.faulty import SECRET


@contextmanager
def serving(listener: socket.socket, drafters: DrafterPool) -> Iterator[None]:
    """Whoever calls at the listener and knows the tests' secret is served."""
    server = DraftServer(listener, SECRET, drafters)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield
    finally:
        server.stop()
        thread.join()
