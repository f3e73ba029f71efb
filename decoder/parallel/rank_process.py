"""The main function of a rank other than 0 (`python -m paceline.decoder.parallel.rank_process FD`): it follows rank 0.

Reads orders from the socket FD until rank 0 ends. All decisions (tokens, lengths, graphs) are rank 0's.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError, RankError
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.decoder import ModelWithCache, load_rank
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.ranks import Member, make_member


class Follower:
    """One rank: its shards of models, and the steps over them."""

    def __init__(self, rank: int, member: Member) -> None:
        self._rank, self.member = rank, member
        self.bodies: dict[int, ModelWithCache] = {}
        self.tensors: dict[tuple[str, str], Tensor] = {}
        self._steps: dict[int, tuple[int, Step]] = {}

    def load(self, number: int, path: str, *, config: ModelConfig, options: DecoderOptions) -> None:
        member = self.member
        self.bodies[number] = load_rank(
            path, config, options, kernels=member.kernels, rank=self._rank, group=member.group
        )

    def release(self, number: int) -> None:
        """Remove a model and its steps, if this rank could load it."""
        self.bodies.pop(number, None)
        self._steps = {key: pair for key, pair in self._steps.items() if pair[0] != number}

    def take(self, tensors: list[tuple[tuple[str, str], bool, bytes]]) -> None:
        """Store this rank's tensors: key in later steps, whether it is a parameter, and its bytes."""
        for name, is_parameter, data in tensors:
            tensor = torch.load(io.BytesIO(data), weights_only=True)
            self.tensors[name] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor

    def make(self, number: int, made: int, step: bytes, *, key: GraphKey, example: tuple[Tensor, ...]) -> None:
        """Compile a step of a model, for inputs like the example's."""
        module: nn.Module = _Receiver(io.BytesIO(step), self).load()
        self._steps[made] = number, self.member.compile(Graph(key, module, example, {}))

    def run(self, number: int, inputs: list[Tensor]) -> None:
        """Run a step. Its outputs equal rank 0's and are dropped."""
        self._steps[number][1](*inputs)


class _Receiver(pickle.Unpickler):
    """Unpickler that puts this rank's objects where rank 0 named one. Rank 0 started this process: it is trusted."""

    def __init__(self, stream: io.BytesIO, follower: Follower) -> None:
        super().__init__(stream)
        self._follower = follower

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "body":
            return self._follower.bodies[rest[0]]
        if kind == "kernels":
            return self._follower.member.kernels
        if kind == "of body":
            number, name = rest
            body = self._follower.bodies[number]
            parameters: dict[str, Tensor] = dict(body.named_parameters())
            return parameters[name] if name in parameters else body.get_buffer(name)
        if kind == "new":
            name, is_parameter, data = rest
            self._follower.take([(name, is_parameter, data)])
            return self._follower.tensors[name]
        return self._follower.tensors[pid]


def main() -> None:
    """Join the group, then follow rank 0."""
    pipe = Connection(int(sys.argv[1]))
    kind, rank, degree, name, meeting, threads, path = pipe.recv()
    sys.path[:] = path  # steps may be from modules that only rank 0's program can import
    torch.set_num_threads(threads)
    member = make_member(kind, rank, degree, name=name)
    pipe.send(None)
    member.meet(meeting)
    pipe.send(None)
    follower = Follower(rank, member)
    while True:
        try:
            order, rest, named = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # rank 0 has finished or died; there is nothing to save
        try:
            getattr(follower, order)(*rest, **named)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if order == "run":
                # The ranks are no longer at the same step; the others detect that this one has ended.
                pipe.send(message)
                os._exit(1)
            pipe.send(
                error
                if isinstance(error, PacelineError)
                else RankError(f"rank {rank} failed: {message}; load the decoder again")
            )
        else:
            if order in ("load", "make"):
                pipe.send(None)


if __name__ == "__main__":
    main()
