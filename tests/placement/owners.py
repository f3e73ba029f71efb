"""Processes that own the cores of a plan and decode with a separate model; a separate file, so that they start fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import CoresBusyError
from paceline.placement.host import environment
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.planning.core_range import CoreRange
from tests.fakes import TableDecoder, table

_V = 24


def occupy(env: tuple[tuple[str, str], ...], cores: CoreRange, link: Connection) -> None:
    """The main function of a process: what a worker does before it loads a model, then answers. Ends with its link."""
    os.environ.update(env)
    environment.check(env)
    torch.set_num_threads(1)
    try:
        CoreLocks(cores).acquire(timeout=0.5)
    except CoresBusyError as error:
        link.send(str(error))
        return
    link.send("")
    with suppress(EOFError):
        while True:
            link.send(said(cores, link.recv()))


def said(cores: CoreRange, prompt: Sequence[int]) -> list[int]:
    """Response of the model on these cores to a prompt: every range has another model."""
    model = TableDecoder(table(_V, seed=100 * cores.first + len(cores), spread=2.0))
    (text,) = SpeculativeGenerator("ngram", model).sample([list(prompt)], max_new_tokens=12).tolist()  # type: ignore[union-attr]
    found: list[int] = text
    return found
