"""The threads of the native kernels: any number of them gives the same bits, no thread waits for ever, none is left."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.protocol import MlpWeights
from paceline.decoder.native.ops import Native

WIDTH, ROWS = 96, 20
"""More rows than a thread prepares for itself, so that the team also waits in the middle of a product."""


def layer(threads: int) -> Tensor:
    """The MLP of a layer of random weights: two products with a barrier between them."""
    torch.set_num_threads(threads)
    rng = torch.Generator().manual_seed(3)
    norm, gate_up, down = (torch.randn(*shape, generator=rng) for shape in ((WIDTH,), (512, WIDTH), (WIDTH, 256)))
    hidden = torch.randn(1, ROWS, WIDTH, generator=rng)
    return Native().mlp(hidden, MlpWeights(norm, gate_up, None, down, None, 1e-5))


@pytest.fixture(autouse=True)
def one_thread_behind() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def test_a_team_of_any_size_gives_the_same_bits() -> None:
    expected = layer(1)
    for threads in (2, 3, 7, 2, 16, 1, 5):  # more than there are cores, fewer than before, and more again
        for _ in range(20):
            assert layer(threads).equal(expected)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
def test_threads_that_leave_a_core_may_return() -> None:
    """All start on one core and may then have every core of the process again: some move, and none stays confined."""
    program = """
import os
from tests.decoder.test_team import layer
cores, threads = os.sched_getaffinity(0), 3
expected = layer(threads)
tasks = [int(name) for name in os.listdir("/proc/self/task")]
for _ in range(20):
    for mask in ({min(cores)}, cores):
        for task in tasks:
            os.sched_setaffinity(task, mask)
        for _ in range(20):
            assert layer(threads).equal(expected)
    assert {frozenset(os.sched_getaffinity(task)) for task in tasks} == {frozenset(cores)}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=Path(__file__).parents[2])


WORKING = """
import sys
from tests.decoder.test_team import layer
expected = layer(3)
print(flush=True)
sys.stdin.readline()
for _ in range(200):
    assert layer(3).equal(expected)
print(flush=True)
sys.stdin.readline()
"""


class Held:
    """A process that waits for a line, computes with a team of three, says a line, and waits for another.

    A debugger can stop its helpers, as if other programs had their cores, and for as long as a test wants.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.input, self.output = process, process.stdin, process.stdout
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        assert self.output.readline() == "\n"
        threads = (int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir())
        self.helpers = [thread for thread in threads if thread != process.pid]
        for thread in self.helpers:
            if self._call("SEIZE", thread):
                process.kill()
                pytest.skip(f"no debugger may look at this process's children: {os.strerror(ctypes.get_errno())}")

    def _call(self, name: str, thread: int) -> int:
        number = {"CONT": 7, "SEIZE": 0x4206, "INTERRUPT": 0x4207}[name]
        failed: int = self._ptrace(number, thread, None, None)
        return failed

    def stop(self, thread: int) -> None:
        assert not self._call("INTERRUPT", thread)
        os.waitpid(thread, _ALL)

    def go_on(self, thread: int) -> None:
        assert not self._call("CONT", thread)

    def start(self) -> None:
        self.input.write("\n")
        self.input.flush()

    def says(self, seconds: float) -> bool:
        return bool(select.select([self.output], [], [], seconds)[0])

    def end(self) -> None:
        self.process.kill()
        for thread in self.helpers:
            os.waitpid(thread, _ALL)


_ALL = 0x40000000  # __WALL: of threads, too


@pytest.fixture
def held() -> Iterator[Held]:
    if not sys.platform.startswith("linux"):
        pytest.skip("ptrace is Linux's")
    command, root = [sys.executable, "-c", WORKING], Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        held = Held(process)
        try:
            yield held
        finally:
            held.end()


def test_the_caller_does_not_wait_for_suspended_helpers(held: Held) -> None:
    assert len(held.helpers) >= 2
    for thread in held.helpers:
        held.stop(thread)
    held.start()
    assert held.says(120), "it waits for helpers"
    assert held.output.readline() == "\n", "the bits are those of a whole team"


def test_work_begun_by_a_helper_is_waited_for(held: Held) -> None:
    """Helpers stop anywhere, for a moment, and continue."""
    held.start()
    while not held.says(0.002):
        for thread in held.helpers:
            held.stop(thread)
            select.select([], [], [], 0.002)
            held.go_on(thread)
    assert held.output.readline() == "\n", "the bits are those of a whole team"


def test_callers_have_separate_teams() -> None:
    expected, found = layer(1), []

    def call() -> None:
        found.extend(layer(3).equal(expected) for _ in range(50))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 200 and all(found)


PROGRAM = """
import os, signal, threading, time
import torch
from tests.decoder.test_team import layer
running = lambda: len(os.listdir("/proc/self/task"))
{body}
"""

SLEEP = "expected = layer(3)\nfor _ in range(3):\n    time.sleep(0.05)\n    assert layer(3).equal(expected)"
END = """
layer(1)
before = running()
caller = threading.Thread(target=layer, args=(4,))
caller.start()
caller.join()
end = time.monotonic() + 60
while running() > before and time.monotonic() < end:
    time.sleep(0.01)  # what a thread leaves is cleared behind its last statement
assert running() == before, (running(), before)
torch.set_num_threads(4)  # has threads of PyTorch's own
before = running()
layer(4)
assert running() == before + 3, (running(), before)
"""
FORK = """
import sys
expected = layer(3)
if not os.fork():
    signal.alarm(60)
    layer(3).equal(expected) or os._exit(1)
    sys.exit(0)  # as a program ends, with all that is done then
assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("body", [SLEEP, END, FORK], ids=["after a sleep", "ends with its thread", "after a fork"])
def test_teams_survive_sleep_exit_and_fork(body: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], timeout=300, env=dict(os.environ), check=False
    )
    assert done.returncode == 0
