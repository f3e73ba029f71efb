"""Jobs for workers of a cluster in tests. Imports little, since every worker imports it; no tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray

DOOMED = "doomed"
"""A file with the id of a node that the test will take away."""
BEGAN = "began"
"""A file that is there once a job runs on it."""


def job(folder: Path, name: str) -> object:
    """Its node, cores and CPUs; or an error, or the end of its process. On the doomed node it takes ten minutes."""
    node = ray.get_runtime_context().get_node_id()
    if node == (folder / DOOMED).read_text():
        (folder / BEGAN).touch()
        time.sleep(600)
    if name == "raise":
        raise ValueError("no such cell")
    if name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)  # so that no worker does all
    return node, os.environ["PACELINE_CORES"], len(os.sched_getaffinity(0))


def make(folder: Path) -> Callable[[str], object]:
    return partial(job, folder)
