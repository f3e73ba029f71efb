"""Every kind of graph as HLO: it lowers, nothing in it is known to be refused by Neuron, and values leave no trace."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor, nn

from paceline.decoder import hlo_lint
from paceline.decoder.backends import xla
from paceline.decoder.backends.base import Graph
from tests.decoder.steps import STEPS, inputs
from tests.decoder.tiny import Workshop

BUDGETS = {
    "prefill": 1_000, "prefill, states": 1_000, "window": 1_000, "window, tree": 1_500, "keep": 500,
    "verify": 4_000, "verify nothing": 4_000, "verify, reject, drawn": 6_500, "verify, typical": 6_500,
    "verify, tree": 4_500, "verify, dynamic tree": 4_500, "draft": 7_500, "draft, drawn": 12_000,
    "draft, some known": 7_500, "fused": 11_500, "plain": 11_000, "fused medusa": 11_000, "fused medusa, kept": 11_000,
    "eagle 3 reads": 1_000, "fused eagle 1": 11_000, "fused eagle 1, static tree": 14_500, "fused eagle 3": 19_500,
}  # fmt: skip
"""HLO instructions of each graph at most: what it has, with about a tenth of room."""


@pytest.fixture(scope="module", params=STEPS)
def graph(request: pytest.FixtureRequest, workshop: Workshop) -> tuple[str, nn.Module, str]:
    body = workshop.decoder(backend="xla").body
    name = request.param
    step = STEPS[name](body, 128)
    return name, step, xla.hlo(Graph(name, step, inputs(name, 1), {}))


Made = tuple[str, nn.Module, str]


def test_no_finding(graph: Made) -> None:
    name, _, text = graph
    found = hlo_lint.lint(text, budget=BUDGETS[name])
    print(f"{name}: {sum(hlo_lint.census(text).values())} instructions, {len(found)} findings")
    assert found == []


def test_other_values_give_the_same_module(graph: Made) -> None:
    name, step, text = graph
    other = xla.hlo(Graph(name, step, inputs(name, 2), {}))
    assert hashlib.sha256(other.encode()).digest() == hashlib.sha256(text.encode()).digest()


def test_every_changed_state_comes_back_as_the_first_results(graph: Made) -> None:
    """The module's results begin with all caches, in order, each of the shape and type of a parameter."""
    _, step, text = graph
    caches = [x for n, x in step.named_buffers() if n.split(".")[-1].startswith(("keys", "values"))]
    if not caches:
        pytest.skip("changes nothing")
    root = next(
        line for line in text.splitlines() if line.strip().startswith("ROOT %tuple") and "parameter" not in line
    )
    assert all(cache.shape == caches[0].shape for cache in caches)
    shape = f"f32[{','.join(map(str, caches[0].shape))}]"
    assert root.split(" tuple(")[0].count(shape) == len(caches)
    assert text.count(f"{shape}{{3,2,1,0}} parameter(") == len(caches)
    for carry in (x for n, x in step.named_buffers() if n == "carry.features"):
        shape = f"f32[{','.join(map(str, carry.shape))}]"
        assert root.split(" tuple(")[0].count(shape) == 1 and f"{shape}{{2,1,0}} parameter(" in text


def lowered(function: object, *example: Tensor) -> str:
    class Step(nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor]:
            return (function(*inputs),)  # type: ignore[operator]

    return xla.hlo(Graph("broken", Step(), example, {}))


FLOATS, WHOLE = torch.randn(4, 8), torch.randint(0, 3, (4, 4), dtype=torch.int32)
BREAKING = {
    "sort": lambda: lowered(lambda x: x.sort(-1).values, FLOATS),
    "variadic reduce": lambda: lowered(lambda x: x.argmax(-1).to(torch.int32), FLOATS),
    "integer dot": lambda: lowered(lambda x: x @ x, WHOLE),
    "64 bits": lambda: lowered(lambda x: x.double() * 2, FLOATS),
    "random": lambda: lowered(lambda x: x + torch.rand_like(x), FLOATS),
    "infinite constant": lambda: lowered(lambda x: x.var(), FLOATS[:, :1]),
    "reduction": lambda: lowered(lambda x: (x > 0).any(-1), FLOATS),
}


@pytest.mark.parametrize("rule", BREAKING)
def test_a_real_graph_that_breaks_a_rule_is_found(rule: str) -> None:
    assert rule in {finding.rule for finding in hlo_lint.lint(BREAKING[rule]())}
