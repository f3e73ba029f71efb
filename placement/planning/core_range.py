"""Core ranges: contiguous, aligned, disjoint. Pure arithmetic; knows no model.

The degrees of an instance divide each other and a run starts at a multiple of its length, so runs nest like the blocks
of a buddy allocator. For such blocks, putting the largest first, each into the smallest free block that holds it, finds
a packing whenever one exists and leaves the most large runs free; the tests compare it with brute force.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.placement.planning.instances import Instance


@dataclass(frozen=True, slots=True, order=True)
class CoreRange:
    """Cores ``first`` to ``last``, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        """Return the format of NEURON_RT_VISIBLE_CORES."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def cores(self) -> range:
        return range(self.first, self.last + 1)


def free_runs(instance: Instance, taken: Iterable[CoreRange], degree: int) -> list[CoreRange]:
    """Return every aligned run of that length without a core in use, ascending."""
    used = {core for item in taken for core in item.cores}
    runs = [CoreRange(start, start + degree - 1) for start in instance.starts(degree)]
    return [run for run in runs if used.isdisjoint(run.cores)]


def best_fit(
    instance: Instance, taken: Sequence[CoreRange], degree: int, *, near: CoreRange | None = None
) -> CoreRange | None:
    """Return the run of that length that fragments free space least; None if no aligned run is free.

    It lies inside the smallest larger run that is still free; among equals nearest to ``near``, then lowest.
    """
    runs = free_runs(instance, taken, degree)
    if not runs:
        return None
    larger = [(d, {run.first for run in free_runs(instance, taken, d)}) for d in instance.degrees if d > degree]

    def breaks(run: CoreRange) -> int:
        """Return the longest free run that this one would break."""
        return max((d for d, firsts in larger if run.first - run.first % d in firsts), default=degree)

    def distance(run: CoreRange) -> int:
        return 0 if near is None else min(abs(run.first - near.last), abs(near.first - run.last))

    return min(runs, key=lambda run: (breaks(run), distance(run), run.first))


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Free cores and their fragmentation.

    free    cores that are not used
    runs    for every degree, longest first: (degree, how many aligned runs of it are free)
    largest the longest degree that can still be placed; 0 if none
    """

    free: int
    runs: tuple[tuple[int, int], ...]
    largest: int

    @property
    def stranded(self) -> float:
        """Share of the free cores outside runs of the longest degree; 0 when no core is free."""
        count = dict(self.runs).get(self.largest, 0)
        return 1 - count * self.largest / self.free if self.free else 0.0


def fragmentation(instance: Instance, taken: Sequence[CoreRange]) -> Fragmentation:
    free = instance.cores - sum(len(item) for item in taken)
    runs = tuple((d, len(free_runs(instance, taken, d))) for d in reversed(instance.degrees))
    return Fragmentation(free, runs, next((d for d, count in runs if count), 0))
