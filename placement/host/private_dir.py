"""Private folders below a temporary folder that all users of a machine share.

Another user may have put a folder or a link where one of ours is to be. They could then move what is written there, or
make it change a file of ours somewhere else.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from paceline.core.errors import WorkerError


def scratch() -> Path:
    """Where this user's locks and sockets lie."""
    return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"


def private(folder: Path) -> None:
    """Make sure of a folder that no other user can change; levels that are missing are made for this user alone.

    Raises:
        WorkerError: it, or a folder it is in, is another user's or can be written by others.
    """
    path = folder.absolute()
    for level in (*reversed(path.parents), path):  # no level is made in one that was not checked
        try:
            if not level.exists():
                level.mkdir(mode=0o700, exist_ok=True)
            status = level.lstat()
        except OSError as error:
            raise WorkerError(f"{folder} cannot be used ({error}); set TMPDIR to a folder of your own") from error
        if not _safe(status):
            raise WorkerError(
                f"{level} belongs to another user, or others can write there, so that {folder} cannot be trusted; "
                "remove it, or set TMPDIR (for locks of cores: PACELINE_LOCKS) to a folder of your own"
            )


def _safe(status: os.stat_result) -> bool:
    """Whether only we and the administrator can change what it holds; all may add to a sticky folder, such as /tmp."""
    if status.st_uid not in (0, os.getuid()):
        return False
    own_group = status.st_gid == os.getgid()
    closed = not status.st_mode & (stat.S_IWOTH | (0 if own_group else stat.S_IWGRP))
    return closed or stat.S_ISLNK(status.st_mode) or bool(status.st_mode & stat.S_ISVTX)
