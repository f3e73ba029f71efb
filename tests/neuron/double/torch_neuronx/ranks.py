"""Ranks of one graph, as threads that meet in its collectives, and these as operations of a recorded graph."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

if not hasattr(torch.ops.neuron_double, "reduce"):

    @torch.library.custom_op("neuron_double::reduce", mutates_args=())
    def reduce(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @torch.library.custom_op("neuron_double::gather", mutates_args=())
    def gather(x: torch.Tensor, degree: int) -> torch.Tensor:
        return torch.cat([x] * degree, -1)


OPERATIONS = torch.ops.neuron_double
"""Of the cores of one group: ``reduce`` adds up, ``gather`` puts last dimensions side by side."""


class Meeting:
    """Ranks as threads, which exchange tensors in a collective."""

    def __init__(self, degree: int) -> None:
        self._barrier, self._given = threading.Barrier(degree, timeout=60), [torch.empty(0)] * degree

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x
        self._barrier.wait()
        every = list(self._given)
        self._barrier.wait()
        return every

    def abort(self) -> None:
        self._barrier.abort()


class Rank(torch.fx.Interpreter):
    """Runs a graph as one rank of several."""

    def __init__(self, graph, rank, meeting) -> None:
        super().__init__(graph)
        self._rank, self._meeting = rank, meeting

    def call_function(self, target, args, kwargs):
        if str(target).startswith("neuron_double."):
            every = self._meeting.exchange(self._rank, args[0])
            return sum(every[1:], every[0]) if "reduce" in str(target) else torch.cat(every, -1)
        return super().call_function(target, args, kwargs)


def execute(key, graph, states, weights, args):
    """A recorded graph on every rank's states and weights, which it names. -> rank 0's outputs; states are written."""
    meeting = Meeting(len(states))

    def one(rank):
        try:
            values = [(states[rank] if name in states[rank] else weights[rank])[name] for name in graph.weights]
            with torch.no_grad():
                # A flat list: what a graph of lists takes, in order.
                return Rank(graph.graph, rank, meeting).run(*values, *[x.clone() for x in args])
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(len(states)) as pool:
        results = list(pool.map(one, range(len(states))))
    for rank, (changed, _) in enumerate(results):
        for name, value in zip(graph.states, changed, strict=True):
            states[rank][name].copy_(value)
    out = [x.clone() for x in results[0][1]]
    if any(not torch.equal(x, y) for _, other in results[1:] for x, y in zip(out, other, strict=True)):
        raise RuntimeError(f"{key}: ranks disagree, and only the first one's outputs come back")
    return out
