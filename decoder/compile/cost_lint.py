"""What the rows of a vocabulary cost in a graph: operations over them, reductions, top-k, gathers and collectives.

A device's vector engine goes over a row once for every operation, whatever the operation is, so that the number of
passes is what a sampler costs where the vocabulary is large. Operations on constants alone are left out: compilers fold
them. Not here: the model's products, which are no passes over rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.decoder.compile import rewrites
from paceline.decoder.compile.lowering import Lowered, operator
from paceline.decoder.kernels import prompt_attention

FREE = frozenset(
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
GATHERS = frozenset({"gather", "index", "index_select"})
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
        if name in GATHERS:
            of_rows = name == "index_select" and is_of_rows(taken[0], inputs)
            self.gathered = max(self.gathered, 0 if of_rows else out)
        elif name in COLLECTIVES:
            self.sent = max(self.sent, *taken[0].shape)
        elif name == "largest":
            self.topk += self._rows(size)
        elif name in _REDUCTIONS:
            self.reductions += self._rows(size)
        elif name not in FREE | PRODUCTS | KERNELS:
            self.passes += self._rows(out)

    def _rows(self, size: int) -> float:
        return size / self.width if size >= self.width else 0.0


def row_cost(lowered: Lowered, width: int) -> RowCost:
    """What a graph does with rows of ``width`` numbers or more."""
    cost, graph = RowCost(width), lowered.graph.graph
    dependent = _made_of_inputs(graph)
    for node in graph.nodes:
        if node.op == "call_function" and node in dependent:
            cost.add(operator(node.target), node.args, node)
    return cost


def step_cost(step: nn.Module, example: Sequence[Tensor], width: int) -> RowCost:
    """As `row_cost` of the graph that a step is lowered to, without making it, which may take minutes.

    The step runs on shapes alone, and every operation is rewritten as it is while a step is lowered.
    """
    counting = _Counting(width)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake, counting:
        fakes = [fake.from_tensor(x) for x in example]
        counting.note([*fakes, *step.parameters(), *step.buffers()])
        step(*fakes)
    return counting.cost


class _Counting(TorchDispatchMode):
    """Counts the operations that depend on tensors it was told of."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cost = RowCost(width)
        self._rewrites, self._noted = rewrites.table(), WeakTensorKeyDictionary()

    def note(self, values: object) -> None:
        for x in tensors(values):
            self._noted[x] = True

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
            self.cost.add(operator(func), args, result)
        return result


def _made_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on an input or a state of the step."""
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(one in dependent for one in node.all_input_nodes):
            dependent.add(node)
    return dependent


def is_of_rows(table: Tensor, arguments: object) -> bool:
    """Whether an `index_select` moves runs of numbers that lie side by side."""
    assert isinstance(arguments, Sequence)
    return table.shape[arguments[1] % table.dim() + 1 :].numel() > 1


def tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors(value)
    elif isinstance(values, fx.Node):
        yield from tensors(values.meta.get("val"))
    elif isinstance(values, Tensor):
        yield values
