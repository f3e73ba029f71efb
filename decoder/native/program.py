"""Recorded steps: a step runs once without its kernels, and its operator calls are replayed in C++ (`program.cpp`).

The shapes of a step never depend on data, so its calls are always the same. Values that depend only on weights and
constants are computed when the step is recorded, and repeated computations are done once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import BackendError
from paceline.core.types import IDLE, RoundLimits, RoundReport
from paceline.decoder.native import build
from paceline.decoder.native.ops import SHAPES

_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e4m3fn: 24,
}
"""Numbers of dtypes in PyTorch's `c10::ScalarType`."""

_LAYOUTS: dict[object, int] = {torch.strided: 0, torch.contiguous_format: 0, torch.preserve_format: 1}
"""Numbers of layouts and memory formats in PyTorch."""

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
_SHAPES = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones")
)
"""Operators that depend only on the shape of a tensor."""

_BY_TENSOR: dict[OpOverload, OpOverload] = {
    getattr(packet, of): packet.Tensor
    for packet in (getattr(torch.ops.aten, name) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"))
    for of in ("Tensor", "Scalar")
}
"""Operators with a number as second operand, and their variants with a tensor."""

_LARGEST = 1 << 16
"""Largest number of elements of a constant of a step: larger values computed from weights are recomputed every time."""


_COMMIT = 3  # inputs before this index are a commit's; from the next index on they are its features
_AFTER = 6
_REASON = 2000  # bytes for the reason of a failure
_INT64 = ctypes.POINTER(ctypes.c_int64)


class _Lent(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", _INT64),
        ("strides", _INT64),
        ("dims", ctypes.c_int64),
        ("type", ctypes.c_int64),
    ]


class _RoundsCall(ctypes.Structure):
    _fields_ = [
        ("program", ctypes.c_void_p),
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


class _Kind(IntEnum):
    """Kind of an argument in the numbers that describe a program; `Kind` in program.cpp."""

    NONE = 0
    INT = auto()
    FLOAT = auto()
    BOOL = auto()
    VALUE = auto()
    INTS = auto()
    FLOATS = auto()
    BOOLS = auto()
    VALUES = auto()
    TEXT = auto()
    CPU = auto()
    WRAPPED = auto()  # a number in place of a tensor; the number follows


class _Value(NamedTuple):
    number: int


@dataclass(slots=True)
class _Call:
    """A call of an operator. Its tensors are `_Value`s, and its results are value numbers."""

    op: OpOverload
    arguments: list[Any]
    results: list[list[int]]

    def reads(self) -> Iterator[int]:
        for one in self.arguments:
            for part in one if isinstance(one, list) else [one]:
                if isinstance(part, _Value):
                    yield part.number

    @property
    def made(self) -> list[int]:
        return [number for numbers in self.results for number in numbers if number >= 0]

    def written(self) -> list[int]:
        changed = zip(self.op._schema.arguments, self.arguments, strict=True)
        return [one.number for argument, one in changed if isinstance(one, _Value) and _writes(argument)]


@dataclass(slots=True)
class _Recorded:
    """The calls of a step. ``values`` holds the tensor of every number; large ones without their data."""

    inputs: int
    values: list[Tensor]
    constants: dict[int, Tensor]
    calls: list[_Call] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def is_parameter(self, number: int) -> bool:
        """Return whether a constant never changes. Buffers may."""
        return isinstance(self.values[number], nn.Parameter)


class _Recorder(TorchDispatchMode):
    """Records every call of an operator. Operators of PyTorch run; kernels only give zeros of the right shape."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = _Recorded(len(inputs), [], {})
        self._numbers = WeakTensorKeyDictionary()
        for one in inputs:
            self._add(one)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: PyTorch 2.13 would import its compiler otherwise, which takes more than a second."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _every_argument(func, args, kwargs or {})
        if _looks_at_numbers(func, given):
            raise BackendError(
                f"a step that reads a tensor's values cannot be recorded: {func}; use backend='inductor'"
            )
        arguments = [self._named(one) for one in given]
        if func._schema.name.startswith("paceline::"):
            out = SHAPES[func._schema.name.removeprefix("paceline::")](*given)
        elif written := [one for spec, one in zip(func._schema.arguments, given, strict=True) if _writes(spec)]:
            self.recorded.calls.append(_Call(func, arguments, [[-1]]))
            return written[0]
        else:
            out = func(*args, **(kwargs or {}))
        call = _Call(func, arguments, [])
        large = _viewed(call) is None
        made = out if isinstance(out, tuple) else (out,)
        call.results = [[self._add(part, small=not large) for part in _parts(one)] for one in made]
        self.recorded.calls.append(call)
        return out

    def _named(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return _Value(self._number(argument))
        return [self._named(one) for one in argument] if isinstance(argument, list | tuple) else argument

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor. A tensor that the step did not make is part of the decoder."""
        if tensor not in self._numbers:
            self.recorded.constants[self._add(tensor, small=True)] = tensor
        number: int = self._numbers[tensor]
        return number

    def _add(self, tensor: Tensor, *, small: bool = False) -> int:
        """Add a value. ``small``: whether it takes no memory, whatever its size."""
        number = self._numbers[tensor] = len(self.recorded.values)
        self.recorded.values.append(tensor if small or tensor.numel() <= _LARGEST else tensor.to("meta"))
        return number

    def number_outputs(self, outputs: Iterable[Tensor]) -> None:
        self.recorded.outputs = [self._number(one) for one in outputs]


def _every_argument(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for place, spec in enumerate(func._schema.arguments):
        if place < len(args) and not spec.kwarg_only:
            found.append(args[place])
        else:
            found.append(kwargs.get(spec.name, spec.default_value))
    return found


def _looks_at_numbers(func: OpOverload, arguments: list[Any]) -> bool:
    if func is torch.ops.aten.index.Tensor:  # masks only
        return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in arguments[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def record(module: nn.Module, example: Sequence[Tensor]) -> _Recorded:
    """Record the calls of a step for inputs of the shapes and types of ``example``, whose values are valid."""
    with torch.no_grad():
        inputs = [one.clone() for one in example]
        with _Recorder(inputs) as recorder:
            outputs = module(*inputs)
        recorder.number_outputs(outputs)
        recorded: _Recorded = recorder.recorded
        recorded.constants = {number: one.detach() for number, one in recorded.constants.items()}
    return recorded


class _Simplifier:
    """Removes from a recording what need not run every time."""

    def __init__(self, recorded: _Recorded) -> None:
        self._recorded = recorded
        self._roots = list(range(len(recorded.values)))  # the value that owns the memory of each value
        for call in recorded.calls:
            if (viewed := _viewed(call)) is not None:
                for number in call.made:
                    self._roots[number] = self._roots[viewed]
        self._changed = {self._roots[number] for call in recorded.calls for number in call.written()}
        self._known = dict(recorded.constants)
        self._fixed = {number for number, one in self._known.items() if recorded.is_parameter(number)}
        self._same: dict[int, int] = {}
        self._numbers: dict[tuple[float, torch.dtype], int] = {}

    def run(self) -> None:
        recorded, seen, left = self._recorded, dict[str, _Call](), list[_Call]()
        for call in recorded.calls:
            call.arguments = [self._renamed(one) for one in call.arguments]
            if self._does_nothing(call) or self._computed(call):
                continue
            self._number_to_tensor(call)
            pure = not call.written() and self._unchanging(call)
            twin = seen.setdefault(f"{call.op}{call.arguments}", call) if pure else call
            if twin is call:
                left.append(call)
            else:
                self._same |= dict(zip(call.made, twin.made, strict=True))
        recorded.outputs = [self._same.get(number, number) for number in recorded.outputs]
        self._copy_outputs(left)
        recorded.calls = _needed(left, recorded.outputs)
        read = {number for call in recorded.calls for number in call.reads()}
        recorded.constants = {number: one for number, one in self._known.items() if number in read}

    def _renamed(self, argument: Any) -> Any:
        if isinstance(argument, _Value):
            return _Value(self._same.get(argument.number, argument.number))
        return [self._renamed(one) for one in argument] if isinstance(argument, list) else argument

    def _number_to_tensor(self, call: _Call) -> None:
        """Replace the number in an addition or comparison by a tensor of the other operand's type: no conversion."""
        by_tensor = _BY_TENSOR.get(call.op)
        if by_tensor is None or not isinstance(call.arguments[1], int | float):
            return
        first = self._recorded.values[call.arguments[0].number]
        number, made = call.arguments[1], self._recorded.values[call.made[0]]
        exact = torch.tensor(number, dtype=first.dtype).item() == number
        if exact and made.dtype in (first.dtype, torch.bool):
            call.op, call.arguments[1] = by_tensor, _Value(self._number_as_tensor(number, first.dtype))

    def _number_as_tensor(self, value: float, dtype: torch.dtype) -> int:
        if (value, dtype) not in self._numbers:
            number = self._numbers[value, dtype] = len(self._recorded.values)
            self._recorded.values.append(torch.tensor(value, dtype=dtype))
            self._roots.append(number)
            self._known[number] = self._recorded.values[number]
            self._fixed.add(number)
        return self._numbers[value, dtype]

    def _does_nothing(self, call: _Call) -> bool:
        """Return whether the call returns its input unchanged; the input then replaces the result."""
        first, *rest = call.arguments
        adds_nothing = call.op in _SUMS and rest[0] == 0 and self._unchanging(call)
        if call.op is not torch.ops.aten.detach.default and not adds_nothing:
            return False
        given, made = (self._recorded.values[number] for number in (first.number, *call.made))
        if given.dtype != made.dtype:
            return False
        self._same[call.made[0]] = first.number
        return True

    def _unchanging(self, call: _Call) -> bool:
        return not any(self._roots[number] in self._changed for number in (*call.reads(), *call.made))

    def _computed(self, call: _Call) -> bool:
        """Return whether the call's result is constant; it is then computed now."""
        reads = [] if call.op in _SHAPES else list(call.reads())
        if call.written() or not all(number in self._known for number in reads):
            return False
        viewed = _viewed(call) is not None
        size = sum(self._recorded.values[number].numel() for number in call.made)
        if not viewed and (size > _LARGEST or not self._unchanging(call) or not self._fixed.issuperset(reads)):
            return False
        self._known |= {number: self._recorded.values[number] for number in call.made}
        if self._fixed.issuperset(reads):
            self._fixed.update(call.made)
        return True

    def _copy_outputs(self, calls: list[_Call]) -> None:
        """Give every output separate memory: callers write into outputs."""
        recorded = self._recorded
        taken = set(range(recorded.inputs)) | {self._roots[number] for number in self._known}
        for place, number in enumerate(recorded.outputs):
            if self._roots[number] in taken:
                recorded.outputs[place] = copy = len(recorded.values)
                recorded.values.append(recorded.values[number])
                calls.append(_Call(torch.ops.aten.clone.default, [_Value(number), None], [[copy]]))
            else:
                taken.add(self._roots[number])


def _viewed(call: _Call) -> int | None:
    """Return the value of which the call's results are views."""
    for spec, argument in zip(call.op._schema.arguments, call.arguments, strict=True):
        if spec.alias_info is not None and not spec.alias_info.is_write and isinstance(argument, _Value):
            return argument.number
    return None


def _parts(value: Any) -> Sequence[Tensor]:
    return value if isinstance(value, list | tuple) else [value]


def _needed(calls: list[_Call], outputs: Iterable[int]) -> list[_Call]:
    """Return the calls that write to a value, or whose results a needed call reads."""
    wanted, needed = set(outputs), list[_Call]()
    for call in reversed(calls):
        if call.written() or not wanted.isdisjoint(call.made):
            call.results = [[number if number in wanted else -1 for number in numbers] for numbers in call.results]
            wanted.update(call.reads())
            needed.append(call)
    return needed[::-1]


class _Encoder:
    def __init__(self, recorded: _Recorded) -> None:
        self.numbers, self.floats, self.texts = list[int](), list[float](), list[str]()
        self._text_places: dict[str, int] = {}
        constants = list(recorded.constants)
        self.constants = [recorded.constants[number] for number in constants]
        order = [*range(recorded.inputs), *constants]
        order += [number for call in recorded.calls for number in call.made]
        self._places = {number: place for place, number in enumerate(order)} | {-1: -1}
        kept = {*range(recorded.inputs), *constants, *recorded.outputs}
        self._write(len(order), recorded.inputs)
        for one in recorded.values[: recorded.inputs]:
            self._list(one.shape)
        self._write(len(recorded.calls))
        ends = _last_reads(recorded.calls)
        for place, call in enumerate(recorded.calls):
            self._call(call, [number for number in ends.get(place, ()) if number not in kept])
        self._list([self._places[number] for number in recorded.outputs])

    def _write(self, *numbers: int) -> None:
        self.numbers += numbers

    def _list(self, numbers: Sequence[int]) -> None:
        self._write(len(numbers), *numbers)

    def _text(self, text: str) -> int:
        if text not in self._text_places:
            self._text_places[text] = len(self.texts)
            self.texts.append(text)
        return self._text_places[text]

    def _float(self, value: float) -> int:
        self.floats.append(float(value))
        return len(self.floats) - 1

    def _call(self, call: _Call, last: list[int]) -> None:
        name, overload = call.op._schema.name, call.op._schema.overload_name
        self._write(self._text(name), self._text(overload), len(call.arguments))
        for spec, argument in zip(call.op._schema.arguments, call.arguments, strict=True):
            self._argument(argument, str(spec.type))
        self._write(len(call.results))
        for numbers in call.results:
            self._list([self._places[number] for number in numbers])
        self._list([self._places[number] for number in last])

    def _argument(self, argument: Any, kind: str) -> None:
        if kind == "Tensor" and isinstance(argument, int | float):
            self._write(_Kind.WRAPPED)
        if argument is None:
            self._write(_Kind.NONE)
        elif isinstance(argument, _Value):
            self._write(_Kind.VALUE, self._places[argument.number])
        elif isinstance(argument, list):
            self._several(argument)
        elif isinstance(argument, bool):
            self._write(_Kind.BOOL, int(argument))
        elif isinstance(argument, float) or (isinstance(argument, int) and "float" in kind):
            self._write(_Kind.FLOAT, self._float(argument))
        elif isinstance(argument, int):
            self._write(_Kind.INT, argument)
        elif isinstance(argument, str):
            self._write(_Kind.TEXT, self._text(argument))
        elif isinstance(argument, torch.device):
            self._write(_Kind.CPU)
        else:
            self._write(_Kind.INT, _TYPES[argument] if isinstance(argument, torch.dtype) else _LAYOUTS[argument])

    def _several(self, arguments: list[Any]) -> None:
        if any(isinstance(one, _Value) for one in arguments):
            self._write(_Kind.VALUES)
            self._list([-1 if one is None else self._places[one.number] for one in arguments])
        elif any(isinstance(one, float) for one in arguments):
            self._write(_Kind.FLOATS)
            self._list([self._float(one) for one in arguments])
        else:
            self._write(_Kind.BOOLS if arguments and isinstance(arguments[0], bool) else _Kind.INTS)
            self._list([int(one) for one in arguments])


def _last_reads(calls: Sequence[_Call]) -> dict[int, list[int]]:
    """Return, for each call, the values that no later call reads."""
    last = {number: place for place, call in enumerate(calls) for number in (*call.made, *call.reads())}
    found: dict[int, list[int]] = {}
    for number, place in last.items():
        found.setdefault(place, []).append(number)
    return found


class Program:
    """A recorded step. A `paceline.decoder.backends.base.Step`, and a `MultiRoundStep` if it is fused.

    Calls run one at a time; a second call waits. A step that reads values cannot be recorded (BackendError).
    """

    def __init__(self, module: nn.Module, example: Sequence[Tensor]) -> None:
        library = build.program_library()
        recorded = record(module, example)
        _Simplifier(recorded).run()
        code, operators = _Encoder(recorded), torch.ops.paceline_program
        self.address: int = operators.open(code.constants, code.numbers, code.floats, code.texts)
        self.close = weakref.finalize(self, library.paceline_close, self.address)
        self.calls, self.constants = recorded.calls, code.constants
        self._run, self._example = operators.run.default, tuple(example)
        self._rounds: _Rounds | None = None

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = self._run(self.address, inputs)
        return outputs

    def run_rounds(
        self, inputs: list[Tensor], seconds: float, limits: RoundLimits
    ) -> tuple[list[RoundReport], list[Tensor]]:
        if self._rounds is None:
            self._rounds = _Rounds(self.address, self._example)
        return self._rounds(inputs, seconds, limits)


class _Rounds:
    """Several fused rounds of a program. ``example``: inputs of the shapes and types of every call."""

    def __init__(self, program: int, example: Sequence[Tensor]) -> None:
        self._library = build.program_library()
        self._why = ctypes.create_string_buffer(_REASON)
        self._slots, self._width = len(example[0]), example[0].shape[1] + 2
        self._inputs, self._left = _lend(example), (ctypes.c_int64 * self._slots)()
        commit = [*example[:_COMMIT], *example[_AFTER:]]
        # Two of each, since a call reads the results of the one before it.
        with torch.inference_mode(False):  # in any mode of the caller: the host writes into commits
            buffers = [[torch.empty_like(one) for one in commit] for _ in range(2)]
        self._made = [(one, (ctypes.c_void_p * len(one))(*(x.data_ptr() for x in one))) for one in buffers]
        self._call = _RoundsCall(
            program=program, inputs=self._inputs, n_inputs=len(example), idle=IDLE, slots=self._slots,
            width=self._width, left=self._left, why=ctypes.cast(self._why, ctypes.c_char_p), room=_REASON,
        )  # fmt: skip
        self._ends: frozenset[int] | None = None
        self._most = 0

    def __call__(
        self, inputs: list[Tensor], seconds: float, limits: RoundLimits
    ) -> tuple[list[RoundReport], list[Tensor]]:
        call = self._call
        call.rounds, call.budget = limits.max_rounds, seconds
        if call.rounds > self._most:
            self._for(call.rounds)
        if call.rounds > 1:
            self._left[:] = limits.remaining  # type: ignore[call-overload]  # any sequence of numbers does
            if limits.end_ids is not self._ends:
                self._ends = limits.end_ids
                call.ends, call.n_ends = _numbers(sorted(limits.end_ids)), len(limits.end_ids)
        for given, tensor in zip(self._inputs, inputs, strict=True):
            given.data = tensor.data_ptr()
        commit, call.made = self._made[0]
        self._made.reverse()
        ran = self._library.paceline_again(ctypes.byref(call))
        if ran < 0:
            raise BackendError(
                f"a round failed: {self._why.value.decode(errors='replace')}; use backend='eager' to see where"
            )
        return self._read(ran), commit

    def _for(self, rounds: int) -> None:
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
