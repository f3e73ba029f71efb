"""Processes that own the cores of a plan and do nothing else; in a file of their own, so that they start fast."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from paceline.core.errors import CoresBusyError
from paceline.placement import environment
from paceline.placement.cores import CoreLocks
from paceline.placement.ranges import CoreRange


def occupy(env: tuple[tuple[str, str], ...], cores: CoreRange, link: Connection) -> None:
    """The main function of a process: what a worker does before it loads a model. Ends when its link does."""
    os.environ.update(env)
    environment.check(env)
    try:
        CoreLocks(cores).acquire(patience=0.5)
        link.send("")
    except CoresBusyError as error:
        link.send(str(error))
    link.poll(None)
