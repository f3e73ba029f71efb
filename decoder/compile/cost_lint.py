"""What the rows of a vocabulary cost in a lowered graph: operations over them, reductions, gathers and collectives.

A device's vector engine goes over a row once for every operation, whatever the operation is, so that the number of
passes is what a sampler costs where the vocabulary is large. Operations on constants alone are left out: compilers fold
them. Not here: the model's products, which are no passes over rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from paceline.decoder.compile.lowering import Lowered, operator

_FREE = frozenset(
    [
        "alias",
        "arange",
        "clone",
        "detach",
        "expand",
        "full",
        "full_like",
        "getitem",
        "new_zeros",
        "ones_like",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
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
_PRODUCTS = frozenset({"linear", "matmul", "embedding"})
_GATHERS = frozenset({"index_select", "gather", "index"})
_COLLECTIVES = frozenset({"all_reduce", "all_gather_into_tensor"})


@dataclass(frozen=True, slots=True)
class RowCost:
    """Of a graph, in rows of the vocabulary's part that a rank has.

    passes      elementwise operations, each counted as often as rows that it goes over
    reductions  the same of sums, maxima and minima
    topk        the same of top-k
    gathered    most numbers that one operation gathers by their place in a row, in all rows of a call together
    sent        most numbers that one collective sends
    """

    passes: float
    reductions: float
    topk: float
    gathered: int
    sent: int

    def each(self, rows: int) -> RowCost:
        """The same for each of so many rows."""
        return RowCost(
            self.passes / rows, self.reductions / rows, self.topk / rows, self.gathered // rows, self.sent // rows
        )


def row_cost(lowered: Lowered, width: int) -> RowCost:
    """What a graph does with rows of ``width`` numbers or more."""
    passes = reductions = topk = 0.0
    gathered = sent = 0
    made = _made_of_inputs(lowered.graph.graph)
    for node in lowered.graph.graph.nodes:
        if node.op != "call_function" or node not in made:
            continue
        name, given = operator(node.target), max((x.numel() for x in _tensors(node.args)), default=0)
        out = max((x.numel() for x in _tensors([node])), default=0)
        if name in _GATHERS:
            gathered = max(gathered, out)
        elif name in _COLLECTIVES:
            sent = max(sent, given)
        elif name == "largest":
            topk += given / width if given >= width else 0.0
        elif name in _REDUCTIONS:
            reductions += given / width if given >= width else 0.0
        elif name not in _FREE | _PRODUCTS and out >= width:
            passes += out / width
    return RowCost(passes, reductions, topk, gathered, sent)


def _made_of_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on an input or a state of the step."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, fx.Node):
        yield from _tensors(values.meta.get("val"))
    elif isinstance(values, Tensor):
        yield values
