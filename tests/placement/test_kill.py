"""A process is killed if it is still the one that was meant: its number may be another's by now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.placement.cluster.actors import ActorSupervisor
from paceline.placement.host import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="this system does not say when a process began")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as made:
        try:
            yield made
        finally:
            made.kill()


@pytest.mark.parametrize("end", [processes.kill, ActorSupervisor("nobody", None).replace], ids=["kill", "keeper"])
def test_only_the_process_that_was_meant_is_killed(child: subprocess.Popen[bytes], end: object) -> None:
    assert callable(end)
    meant = processes.running(child.pid)
    assert meant.began
    before = replace(meant, began=meant.began - 1)  # had this number, and is gone
    assert end(before) is False
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    assert end(meant) is True and child.wait(30) == -9
    assert end(meant) is False
