"""The local machine: which process is killed, threads that end with their work, and folders that others may share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import WorkerError
from paceline.placement.cluster.replica_group import ActorSupervisor
from paceline.placement.host import processes
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.environment import private
from paceline.placement.host.processes import run_apart
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.remote.channel import Address, listen


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as made:
        try:
            yield made
        finally:
            made.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not say when a process began")
@pytest.mark.parametrize("end", [processes.kill, ActorSupervisor("nobody", None).replace], ids=["kill", "keeper"])
def test_only_the_intended_process_is_killed(child: subprocess.Popen[bytes], end: object) -> None:
    assert callable(end)
    meant = processes.running(child.pid)
    assert meant.began
    before = replace(meant, began=meant.began - 1)  # had this number, and is gone
    assert end(before) is False
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    assert end(meant) is True and child.wait(30) == -9
    assert end(meant) is False


PROGRAM = """
import os, time, torch
from paceline.placement.host.processes import run_apart
torch.set_num_threads(2)
def work():
    torch.ones(2000, 2000).exp().sum()  # a parallel loop
    return torch.get_num_threads()
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
threads, end = run_apart(work), time.monotonic() + 30
while count() > before and time.monotonic() < end:
    time.sleep(0.01)  # its threads end by themselves
apart = count()
work()
print(threads, apart - before, count() > apart)
"""


def test_a_thread_team_ends_with_its_thread_whose_exceptions_are_raised() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["2", "0", "True"]
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 / 0)


def test_every_created_folder_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    for level in ("a", "a/b", "a/b/c"):
        assert (tmp_path / level).stat().st_mode & 0o777 == 0o700
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o1777)  # as /tmp: nobody can move what is another's
    private(tmp_path / "all" / "mine")


@pytest.mark.parametrize("level", ["sockets", "sockets/inner"])
def test_a_folder_writable_by_others_is_rejected(tmp_path: Path, level: str) -> None:
    (tmp_path / "sockets" / "inner").mkdir(parents=True)
    (tmp_path / level).chmod(0o777)
    with pytest.raises(WorkerError, match=f"{tmp_path / level}: expected a folder that only you can write to"):
        listen(Address(path=str(tmp_path / "sockets" / "inner" / "s")))


@pytest.mark.skipif(os.getuid() != 0, reason="only the administrator can give a folder away")
def test_a_folder_or_link_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, elsewhere = tmp_path / "theirs", tmp_path / "elsewhere"
    theirs.mkdir()
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    for path in (theirs, tmp_path / "link"):
        os.chown(path, 12345, 12345, follow_symlinks=False)
        monkeypatch.setenv("PACELINE_LOCKS", str(path))
        with pytest.raises(WorkerError, match="expected a folder that only you can write to, got one of"):
            CoreLocks(CoreRange(0, 0)).acquire(timeout=0)
    assert not list(elsewhere.iterdir())


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOCKS", str(tmp_path))
    (tmp_path / "local").mkdir(mode=0o700)
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "local" / "core-1").symlink_to(precious)
    with pytest.raises(WorkerError, match="core-1 cannot be opened"):
        CoreLocks(CoreRange(0, 1)).acquire(timeout=0)
    assert precious.read_text() == "precious"
    again = CoreLocks(CoreRange(0, 0))
    again.acquire(timeout=0)  # what was taken before was given back
    again.release()
