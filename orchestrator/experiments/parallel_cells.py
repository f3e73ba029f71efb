"""Cells of an experiment on a Ray cluster: each worker has cores of its own and keeps its decoders from cell to cell.

Results are written by the process that asks, as they come, so that a run that is killed keeps what is finished. Not
here: where workers run (`paceline.placement.cluster.jobs`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.experiments.config import ExperimentConfig
from paceline.experiments.measure import Bench
from paceline.experiments.provenance import provenance
from paceline.experiments.runner import PlannedCell, run_cell
from paceline.experiments.store import CellResult


@dataclass(frozen=True, slots=True)
class _MakeBench:
    """Makes what runs cells in a worker. ``folder``: to which the paths of the experiment are relative."""

    config: ExperimentConfig
    folder: str

    def __call__(self) -> Callable[[PlannedCell], CellResult]:
        os.chdir(self.folder)
        return partial(run_cell, bench=Bench(self.config))


def run_parallel(
    config: ExperimentConfig, cells: Sequence[PlannedCell], *, address: str
) -> Iterator[tuple[int, CellResult]]:
    """Run cells on a cluster. -> (place in ``cells``, result), as they are finished; failed ones have their error

    address  as of `paceline.placement.cluster.jobs.JobWorkers`

    Raises:
        PlanError: no node has room for a cell.
        WorkerError: the cluster is not there.
    """
    from paceline.placement.cluster.jobs import JobWorkers

    make = _MakeBench(config, str(Path.cwd()))
    count = min(len(cells), config.cells_at_once or len(cells))
    with JobWorkers(make, address=address, degree=config.cores_per_cell, count=count) as workers:
        for outcome in workers.run(cells):
            one = cells[outcome.index]
            lost = CellResult(one.key, one.cell.names(), provenance=provenance(), error=outcome.error)
            yield outcome.index, lost if outcome.error is not None else outcome.result
