"""Many models side by side on a simulated inf2.48xlarge: a process for each placement, holding the cores of its plan.

The models are tables (`test_ray` has real ones in workers on Ray); a process is started as planned, takes the locks
that stand for cores on a host without Neuron, and answers while all others do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.core.errors import CoresBusyError, PlanError
from paceline.placement import INSTANCES, Placement, plan
from paceline.placement.host.core_locks import held
from paceline.placement.planning.core_range import CoreRange, Fragmentation, fragmentation
from paceline.placement.planning.model_specs import ModelSpec
from tests.placement.owners import occupy, said
from tests.placement.wishes import model

MACHINE = INSTANCES["inf2.48xlarge"]
PROMPT = [3, 1, 4, 1, 5]


class Machine:
    """The processes that run now."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._context = stack, multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.placement.faulty"])  # one server for all tests; see there
        self._locks = "PACELINE_LOCKS", os.environ["PACELINE_LOCKS"]  # the server was started without it
        self.running: dict[str, tuple[Placement, int | None]] = {}
        self._links: dict[str, Connection] = {}
        self._ends: dict[str, ExitStack] = {}

    def start(self, *items: Placement) -> None:
        """All at once; each has its cores, or the error says why not."""
        links = []
        for item in items:
            here, there = self._context.Pipe()
            made = self._context.Process(target=occupy, args=((*item.env, self._locks), item.cores, there), daemon=True)
            made.start()
            there.close()
            end = self._ends[item.label] = ExitStack()
            for closing in (here.close, made.join, made.kill):  # in the order they are needed, backwards
                end.callback(closing)
            self._stack.push(end)
            self.running[item.label] = item, made.pid
            self._links[item.label] = here
            links.append(here)
        said = [link.recv() for link in links]
        if any(said):
            raise CoresBusyError("; ".join(filter(None, said)))

    def leave(self, label: str) -> CoreRange:
        """Kill one; -> the cores it had."""
        item, _ = self.running.pop(label)
        del self._links[label]
        self._ends.pop(label).close()
        return item.cores

    @property
    def taken(self) -> list[CoreRange]:
        return [item.cores for item, _ in self.running.values()]

    @property
    def left(self) -> Fragmentation:
        return fragmentation(MACHINE, self.taken)

    def check(self) -> None:
        """Every planned core is held by its process, no other core by any process, and all answer at the same time."""
        assert held() == {core: pid for item, pid in self.running.values() for core in item.cores.cores}
        assert len(held()) == sum(len(item.cores) for item, _ in self.running.values())  # nobody shares one
        for link in self._links.values():
            link.send(PROMPT)
        answers = {label: link.recv() for label, link in self._links.items()}
        assert answers == {label: said(item.cores, PROMPT) for label, (item, _) in self.running.items()}
        assert len(set(map(tuple, answers.values()))) == len(answers)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PACELINE_LOCKS", str(tmp_path / "locks"))
    with ExitStack() as stack:
        yield Machine(stack)


def started(machine: Machine, models: Sequence[ModelSpec]) -> None:
    machine.start(*plan(models, MACHINE).placements)
    machine.check()


def come(machine: Machine, name: str, degree: int) -> CoreRange:
    """A model comes to those that run."""
    (item,) = plan([model(name, degree)], MACHINE, taken=machine.taken).placements
    machine.start(item)
    machine.check()
    return item.cores


def test_three_models_fill_an_instance_and_a_freed_one_is_reused(machine: Machine) -> None:
    started(machine, [model(name, 8) for name in "abc"])
    assert machine.left.free == 0
    with pytest.raises(PlanError, match="0 of 24"):
        plan([model("d", 1)], MACHINE, taken=machine.taken)
    unaware = plan([model("rival", 8)], MACHINE, taken=[CoreRange(0, 7)]).placements
    with pytest.raises(CoresBusyError, match="core 8 of 8-15 is in use by process"):
        machine.start(*unaware)
    machine.leave("rival")
    gap = machine.leave("b")
    machine.check()
    assert come(machine, "d", 2).first in gap.cores
    left = machine.left
    assert (left.free, left.largest, dict(left.runs)[4]) == (6, 4, 1) and round(left.stranded, 3) == 0.333
    with pytest.raises(PlanError, match="wants 8 cores and 6 of 24"):
        plan([model("e", 8)], MACHINE, taken=machine.taken)
    machine.leave("d")
    assert come(machine, "e", 8) == gap
