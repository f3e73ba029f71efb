"""What a step asks of an accelerator's engines: bytes, operations by engine and type, gathers, collectives.

The step runs on shapes alone (fake tensors), each operation rewritten as it is while a step is lowered, so that a model
of any size is counted in seconds. So are passes over rows of the vocabulary: a device's vector engine goes over a row
once for every operation, whatever the operation is, so that they are what a sampler costs where the vocabulary is
large; compilers fold operations on constants alone. Not here: how fast engines are (`paceline.neuron.chips`).
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

_FREE = frozenset(
    [
        "alias",
        "arange",
        "clone",
        "detach",
        "device",  # asks a tensor where it is
        "expand",
        "full",
        "full_like",
        "getitem",
        "lift_fresh_copy",
        "new_zeros",
        "ones_like",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
        "zeros",
        "zeros_like",
        "_unsafe_view",
    ]
)
"""Operations that compute nothing, or fill a tensor with one number."""
_REDUCTIONS = frozenset({"amax", "amin", "sum"})
PRODUCTS = frozenset({"addmm", "bmm", "embedding", "linear", "matmul", "mm", "product"})
_GATHERS = frozenset({"gather", "index", "index_select"})
COLLECTIVES = frozenset({"all_reduce", "all_gather_into_tensor"})
KERNELS = frozenset({prompt_attention.NAME})
"""Of a device's library: no passes over rows of logits."""


@dataclass(slots=True)
class RowCost:
    """Of a graph, in rows of ``width`` numbers: those of the vocabulary, or of the part of it that a rank has.

    passes      elementwise operations, each counted as often as rows that it goes over
    reductions  the same of sums, maxima and minima
    topk        the same of top-k
    gathered    most single numbers that one operation gathers by their places, in all rows together
    sent        most numbers of a row that one collective sends: the longest side of what it is given
    """

    width: int
    passes: float = 0.0
    reductions: float = 0.0
    topk: float = 0.0
    gathered: int = 0
    sent: int = 0

    def add(self, name: str, inputs: object, outputs: object) -> None:
        """Count an operation of that name with these arguments and results. Whole rows of a table are no gather."""
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
    """Whether an `index_select` moves runs of numbers that lie side by side."""
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

    read         bytes of weights, caches and tables that products and look-ups read
    widened      bytes of weights and caches that are made float32 before a product
    products     operations (two for a multiplication with its addition) by the type that is multiplied
    vector       elements that elementwise operations and reductions go over
    scalar       the same of exponentials, logarithms and roots
    gathered     single numbers gathered by their places, in all; ``largest`` in one operation
    collectives  how many, by name and bytes of what a rank gives
    operations   how many there are, whatever their size
    tiles        instructions: one for every 128 x 512 elements of an operation
    rows         what is done to rows of the vocabulary
    """

    rows: RowCost
    read: float = 0
    widened: float = 0
    vector: float = 0
    scalar: float = 0
    gathered: float = 0
    largest: float = 0
    operations: float = 0
    tiles: float = 0
    products: Counter[str] = field(default_factory=Counter)
    collectives: Counter[tuple[str, int]] = field(default_factory=Counter)

    def plus(self, other: Work, times: float = 1) -> Work:
        """Both, the other one so many times (or less, if negative)."""
        work = Work(RowCost(self.rows.width))
        for one in fields(Work):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            if one.name == "rows":
                for name in ("passes", "reductions", "topk"):
                    setattr(work.rows, name, getattr(ours, name) + times * getattr(theirs, name))
                work.rows.gathered, work.rows.sent = max(ours.gathered, theirs.gathered), max(ours.sent, theirs.sent)
            elif one.name == "largest":
                work.largest = max(ours, theirs)
            elif isinstance(ours, Counter):
                total = {key: ours[key] + times * theirs[key] for key in (*ours, *theirs)}
                setattr(work, one.name, Counter({key: count for key, count in total.items() if count}))
            else:
                setattr(work, one.name, ours + times * theirs)
        return work


def step_work(step: nn.Module, example: Sequence[Tensor], width: int, *, tile: int) -> Work:
    """Count a step whose weights may be fake; ``width``: ids of a rank's part of the vocabulary."""
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
        """Weights and caches: what products read from memory."""
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
        if name.startswith("index_put"):  # what is written, not all that lies around it
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
                work.largest = max(work.largest, out[0].numel())
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
        """Attention over a prompt by a kernel: two products and a softmax, whose scores are never written to memory.

        Scores of rows that are masked are counted: which prior rows are used is not known before.
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
