"""Folders in a temporary folder that is everybody's: what another user prepared there is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.errors import WorkerError
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.environment import private
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.remote.channel import Address, listen


def test_every_level_that_is_made_is_ours_alone(tmp_path: Path) -> None:
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
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, level: str) -> None:
    (tmp_path / "sockets" / "inner").mkdir(parents=True)
    (tmp_path / level).chmod(0o777)
    with pytest.raises(WorkerError, match=f"{tmp_path / level}: expected a folder that only you can write to"):
        listen(Address(path=str(tmp_path / "sockets" / "inner" / "s")))


@pytest.mark.skipif(os.getuid() != 0, reason="only the administrator can give a folder away")
def test_a_folder_or_a_link_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
