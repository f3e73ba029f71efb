"""Folders below a temporary folder that all users of a machine share: ours alone, or none at all.

Another user may have put a folder or a link where ours is to be; what is then written there would be theirs to move,
or would change a file of ours somewhere else.
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
    """Have a folder that nobody else can change; what is missing is made for its owner alone.

    Raises:
        WorkerError: it, or a folder it is in, is another user's or can be written by others.
    """
    whole = folder.absolute()
    for level in (*reversed(whole.parents), whole):  # nothing is made in one that was not looked at
        try:
            if not level.exists():
                level.mkdir(mode=0o700, exist_ok=True)
            found = level.lstat()
        except OSError as error:
            raise WorkerError(f"{folder} cannot be used ({error}); set TMPDIR to a folder of your own") from error
        if not _safe(found):
            raise WorkerError(
                f"{level} belongs to another user, or others can write there, so that {folder} cannot be trusted; "
                "remove it, or set TMPDIR (for locks of cores: PACELINE_LOCKS) to a folder of your own"
            )


def _safe(found: os.stat_result) -> bool:
    """Whether only we and the administrator can change what it holds; all may add to a sticky folder, such as /tmp."""
    if found.st_uid not in (0, os.getuid()):
        return False
    own_group = found.st_gid == os.getgid()
    closed = not found.st_mode & (stat.S_IWOTH | (0 if own_group else stat.S_IWGRP))
    return closed or stat.S_ISLNK(found.st_mode) or bool(found.st_mode & stat.S_ISVTX)
