"""Work of a step on an accelerator's engines: bytes, operations by engine and type, gathers, collectives.

The step runs on shapes only (fake tensors), with the rewrites of lowering, so that a model of any size is counted in
seconds. Passes over rows of the vocabulary are counted too: a device's vector engine passes over a row once per
operation, so they are the cost of a sampler with a large vocabulary; compilers fold operations on constants. Speeds of
engines are in `paceline.neuron.chips`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.neuron import lowering, prompt_attention
from paceline.neuron.lowering import operator

_NOTHING = """
    alias arange clone detach device expand full full_like getitem lift_fresh_copy new_zeros ones_like permute reshape
    select slice split split_with_sizes squeeze t transpose unsqueeze view zeros zeros_like _unsafe_view
"""
_FREE = frozenset(_NOTHING.split())
"""Operations that compute nothing, read a tensor's device, or fill a tensor with one number."""
_REDUCTIONS = frozenset({"amax", "amin", "sum"})
PRODUCTS = frozenset({"addmm", "bmm", "embedding", "linear", "matmul", "mm", "product"})
_GATHERS = frozenset({"gather", "index", "index_select"})
COLLECTIVES = frozenset({"all_reduce", "all_gather_into_tensor"})
"""PyTorch's, which a backend of several ranks replaces by its device's."""
KERNELS = frozenset({prompt_attention.NAME})
"""Kernels of a device's library, one custom call each: they make no passes over rows of logits."""


@dataclass(slots=True)
class RowCost:
    """Work of a graph on rows of ``width`` numbers: those of the vocabulary, or of a rank's part of it.

    passes      elementwise operations, each counted once per row
    reductions  sums, maxima and minima, counted in the same way
    topk        top-k, counted in the same way
    gathered    most single numbers that one operation gathers by index, in all rows together
    sent        most numbers of a row that one collective sends: the longest side of its input
    """

    width: int
    passes: float = 0.0
    reductions: float = 0.0
    topk: float = 0.0
    gathered: int = 0
    sent: int = 0

    def add(self, name: str, inputs: object, outputs: object) -> None:
        """Count an operation by its name. Whole rows of a table do not count as gathered."""
        taken, out = list(tensors(inputs)), max((x.numel() for x in tensors(outputs)), default=0)
        size = max((x.numel() for x in taken), default=0)
        if name in _GATHERS:
            of_rows = name == "index_select" and _is_of_rows(taken[0], inputs)
            self.gathered = max(self.gathered, 0 if of_rows else out)
        elif name in COLLECTIVES:
            self.sent = max(self.sent, *taken[0].shape)
        elif name == "largest":
            self.topk += self._rows(size)
        elif name in _REDUCTIONS:
            self.reductions += self._rows(size)
        elif name not in _FREE | PRODUCTS | KERNELS:
            self.passes += self._rows(out)

    def _rows(self, size: int) -> float:
        return size / self.width if size >= self.width else 0.0


def _is_of_rows(table: Tensor, arguments: object) -> bool:
    """Return whether an `index_select` moves runs of adjacent numbers."""
    assert isinstance(arguments, Sequence)
    return table.shape[arguments[1] % table.dim() + 1 :].numel() > 1


def tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, Tensor):
        yield values


_SCALAR = frozenset({"exp", "log", "log1p", "pow", "rsqrt", "silu", "sigmoid", "sin", "cos", "tanh", "gelu"})
_COPIES = frozenset({"_to_copy", "convert_element_type"})


@dataclass(slots=True)
class Work:
    """Counts of one call of a step, on one rank.

    read         bytes of weights, caches and tables that matmuls and look-ups read
    widened      bytes of weights and caches that are converted to float32 before a matmul
    products     operations (two for a multiplication with its addition) by the type of the operands
    vector       elements of elementwise operations and reductions
    scalar       elements of exponentials, logarithms and roots
    gathered     single numbers gathered by index, in total
    collectives  number, by name and bytes of a rank's input
    operations   number of operations of any size
    tiles        instructions: one for every 128 x 512 elements of an operation
    rows         work on rows of the vocabulary
    """

    rows: RowCost
    read: float = 0
    widened: float = 0
    vector: float = 0
    scalar: float = 0
    gathered: float = 0
    operations: float = 0
    tiles: float = 0
    products: Counter[str] = field(default_factory=Counter)
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)

    def plus(self, other: Work, times: float = 1) -> Work:
        """Add ``times`` times other work (subtract it if negative)."""
        work = Work(RowCost(self.rows.width))
        for one in fields(Work):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name == "rows":
                for name in ("passes", "reductions", "topk"):
                    setattr(work.rows, name, getattr(ours, name) + times * getattr(theirs, name))
                work.rows.gathered, work.rows.sent = max(ours.gathered, theirs.gathered), max(ours.sent, theirs.sent)
            elif isinstance(ours, Counter):
                total = {key: ours[key] + times * theirs[key] for key in (*ours, *theirs)}
                setattr(work, one.name, Counter({key: count for key, count in total.items() if count}))
            else:
                setattr(work, one.name, ours + times * theirs)
        return work


def step_work(step: nn.Module, example: Sequence[Tensor], width: int, *, tile: int) -> Work:
    """Count the work of a step whose weights may be fake; ``width``: ids of a rank's part of the vocabulary."""
    counting = _Counting(width, tile)
    fake = next((x.fake_mode for x in step.parameters() if hasattr(x, "fake_mode")), None)
    with torch.no_grad(), fake or FakeTensorMode(allow_non_fake_inputs=True) as mode, counting:
        fakes = [mode.from_tensor(x) for x in example]
        counting.note_state([*step.parameters(), *step.buffers()])
        counting.note(fakes)
        step(*fakes)
    return counting.work


class _Counting(TorchDispatchMode):
    """Counts the operations that depend on inputs or states."""

    def __init__(self, width: int, tile: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work(RowCost(width))
        self._tile, self._rewrites = tile, lowering.rewrites()
        self._noted, self._state = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def note(self, values: object) -> None:
        for x in tensors(values):
            self._noted[x] = True

    def note_state(self, values: object) -> None:
        """Register weights and caches: the tensors that matmuls read from memory."""
        self.note(values)
        for x in tensors(values):
            self._state[x] = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self._rewrites:
            with self:
                result = self._rewrites[func](*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        if any(x in self._noted for x in tensors(args)):
            self.note(result)
            self._count(operator(func), args, result)
        return result

    def _count(self, name: str, args: object, result: object) -> None:
        work, taken, out = self.work, list(tensors(args)), list(tensors(result))
        work.rows.add(name, args, result)
        size = max((x.numel() for x in (*taken, *out)), default=0)
        if name in _FREE:
            if taken and taken[0] in self._state:  # a view of a state is the state
                self._mark(out)
            return
        if name.startswith("index_put"):  # count the written numbers only, not the whole tensor
            size = taken[-1].numel()
        work.operations += 1
        work.tiles += -(-size // self._tile)
        if name in KERNELS:
            self._prompt(taken)
        elif name in PRODUCTS:
            self._product(name, taken, out)
        elif name in COLLECTIVES:
            work.collectives[name, taken[0].numel() * taken[0].element_size()] += 1
        elif name in _GATHERS:
            moved = sum(x.numel() * x.element_size() for x in out)
            work.read += moved
            if not (name == "index_select" and _is_of_rows(taken[0], args)):
                work.gathered += out[0].numel()
        elif name.startswith("index_put"):
            self._mark([*out, taken[0]])
        elif name in _COPIES and taken[0] in self._state and taken[0].dim() > 1:  # the vectors of norms may
            if out[0].element_size() > taken[0].element_size():
                work.widened += taken[0].numel() * taken[0].element_size()
            self._mark(out)
        elif name in _SCALAR:
            work.scalar += size
        else:
            work.vector += size

    def _product(self, name: str, taken: list[Tensor], out: list[Tensor]) -> None:
        if name == "embedding":
            self.work.read += out[0].numel() * out[0].element_size()
            return
        sides = taken[-2:]
        self.work.products[str(sides[0].dtype).removeprefix("torch.")] += 2 * out[0].numel() * sides[0].shape[-1]
        self.work.read += sum(x.numel() * x.element_size() for x in sides if x in self._state)
        self.work.tiles += -(-sides[1].numel() // (128 * 128))  # the engine holds 128 x 128 numbers of a matrix

    def _prompt(self, taken: list[Tensor]) -> None:
        """Count attention over a prompt by a kernel: two matmuls and a softmax; no score is written to memory.

        Scores of masked rows are counted: the number of used prior rows is not known in advance.
        """
        query, keys = taken[0], taken[1:5:2]  # of the chunk, and of the rows before it if there are any
        columns = sum(x.shape[1] for x in keys)
        scores = query.shape[0] * query.shape[1] * columns
        self.work.products[str(query.dtype).removeprefix("torch.")] += 4 * scores * query.shape[2]
        self.work.read += sum(x.numel() * x.element_size() for x in taken if x in self._state)
        self.work.scalar += scores  # exponentials
        self.work.vector += 2 * scores  # their maximum and their sum
        self.work.tiles += 3 * -(-scores // self._tile)
        self.work.tiles += 2 * keys[0].shape[0] * -(-columns // 128) * -(-query.shape[2] // 128)

    def _mark(self, found: list[Tensor]) -> None:
        for x in found:
            self._state[x] = True
