"""Compiled graphs that other threads of Python do not wait for, and fused rounds of one, one behind the other, without
Python in between; see `rounds.cpp`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import BackendError
from paceline.core.types import IDLE, MultiRoundLimits, RoundReport
from paceline.decoder.native import build

_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
}
"""Their numbers in PyTorch's `c10::ScalarType`."""

_COMMIT = 3  # inputs before this place are a commit's, and so are those from the next one on: its features
_BEHIND = 6
_REASON = 2000  # bytes for why something failed
_INT64 = ctypes.POINTER(ctypes.c_int64)


class _Lent(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", _INT64),
        ("strides", _INT64),
        ("dims", ctypes.c_int64),
        ("type", ctypes.c_int64),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("graph", ctypes.c_void_p),
        ("inputs", ctypes.POINTER(_Lent)),
        ("n_inputs", ctypes.c_int64),
        ("rounds", ctypes.c_int64),
        ("budget", ctypes.c_double),
        ("idle", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("left", _INT64),
        ("ends", _INT64),
        ("n_ends", ctypes.c_int64),
        ("told", ctypes.POINTER(ctypes.c_int32)),
        ("seconds", ctypes.POINTER(ctypes.c_double)),
        ("made", ctypes.POINTER(ctypes.c_void_p)),
        ("why", ctypes.c_char_p),
        ("room", ctypes.c_int64),
    ]


class CompiledGraph:
    """A package of AOTInductor over tensors of ours, which stay in place. A `paceline.decoder.backends.base.Step`.

    ``state``: tensors by name; it takes those that it needs. One call at a time runs; another one waits for it.

    Raises:
        RuntimeError: PyTorch cannot open the package; or, of a call, the graph failed.
    """

    def __init__(self, package: Path, state: Mapping[str, Tensor]) -> None:
        build.rounds_library()
        operators = torch.ops.paceline_package
        self.address: int = operators.open(str(package))
        self.close = weakref.finalize(self, operators.close, self.address)
        self.constants = {name: state[name] for name in operators.names(self.address)}
        operators.fill(self.address, list(self.constants), list(self.constants.values()))
        self._run = operators.run.default

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = self._run(self.address, inputs)
        return outputs


class Rounds:
    """Several fused rounds of a graph. ``example``: inputs of the shapes and types it always gets.

    A `paceline.decoder.backends.base.MultiRoundStep.run_rounds`.
    """

    def __init__(self, graph: CompiledGraph, example: Sequence[Tensor]) -> None:
        self._library, self._graph = build.rounds_library(), graph
        self._why = ctypes.create_string_buffer(_REASON)
        self._slots, self._width = len(example[0]), example[0].shape[1] + 2
        self._inputs, self._left = _lend(example), (ctypes.c_int64 * self._slots)()
        commit = [*example[:_COMMIT], *example[_BEHIND:]]
        # Two of each, since a call reads what the one before it made.
        with torch.inference_mode(False):  # whatever the caller's mode is: the host writes into commits, in any
            buffers = [[torch.empty_like(one) for one in commit] for _ in range(2)]
        self._made = [(one, (ctypes.c_void_p * len(one))(*(x.data_ptr() for x in one))) for one in buffers]
        self._call = _Call(
            graph=graph.address, inputs=self._inputs, n_inputs=len(example), idle=IDLE, slots=self._slots,
            width=self._width, left=self._left, why=ctypes.cast(self._why, ctypes.c_char_p), room=_REASON,
        )  # fmt: skip
        self._ends: frozenset[int] | None = None
        self._most = 0

    def __call__(
        self, inputs: list[Tensor], seconds: float, room: MultiRoundLimits | None
    ) -> tuple[list[RoundReport], list[Tensor]]:
        call = self._call
        call.rounds, call.budget = 1 if room is None else room.max_rounds, seconds
        if call.rounds > self._most:
            self._for(call.rounds)
        if room is not None:
            self._left[:] = room.remaining  # type: ignore[assignment]  # a list of numbers is one of numbers or others
            if room.end_ids is not self._ends:
                self._ends = room.end_ids
                call.ends, call.n_ends = _numbers(sorted(room.end_ids)), len(room.end_ids)
        for lent, tensor in zip(self._inputs, inputs, strict=True):
            lent.data = tensor.data_ptr()
        commit, call.made = self._made[0]
        self._made.reverse()
        ran = self._library.paceline_again(ctypes.byref(call))
        if ran < 0:
            raise BackendError(f"a round failed: {self._why.value.decode(errors='replace')}")
        return self._read(ran), commit

    def _for(self, rounds: int) -> None:
        """Make room for what so many rounds tell."""
        self._most = rounds
        self._told = (ctypes.c_int32 * (rounds * self._slots * self._width))()
        self._seconds = (ctypes.c_double * rounds)()
        self._call.told, self._call.seconds = self._told, self._seconds

    def _read(self, ran: int) -> list[RoundReport]:
        size, width = self._slots * self._width, self._width
        flat, reports = self._told[: ran * size], []
        for number, seconds in enumerate(self._seconds[:ran]):
            rows = [flat[at : at + width] for at in range(number * size, (number + 1) * size, width)]
            reports.append(RoundReport.of(rows, seconds))
        return reports


def _lend(tensors: Sequence[Tensor]) -> ctypes.Array[_Lent]:
    return (_Lent * len(tensors))(
        *(
            _Lent(one.data_ptr(), _numbers(one.shape), _numbers(one.stride()), one.dim(), _TYPES[one.dtype])
            for one in tensors
        )
    )


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
