"""Serving until somebody ends it: Ray is started or joined, the application deployed, and all taken down again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import ray
from ray import serve

from paceline.placement import Plan
from paceline.placement.care import Care
from paceline.placement.group import RESOURCE
from paceline.serving.app import application

_HERE = "local"  # a new cluster, though another one may run on this machine
_CPUS = 2  # of Ray's own count; workers on cores do not take part in it


def run(made: Plan, care: Care, *, host: str, port: int, address: str | None, ready: Callable[[], None]) -> None:
    """Serve a plan until SIGINT or SIGTERM. ``ready`` is called when requests are taken."""
    own = (
        {} if address else {"resources": {RESOURCE: made.instance.cores}, "num_cpus": _CPUS, "include_dashboard": False}
    )
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    ray.init(address=address or _HERE, log_to_driver=False, **own)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(made, care), name="paceline", route_prefix="/")
        ready()
        over.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
