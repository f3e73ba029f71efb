"""Lowered steps: pure graphs that compute the same, in operations that compilers take, with every index in range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from paceline.core.errors import BackendError
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.collectives import DeviceGroup
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.neuron import graph_lint
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, constants_of, lower, state_of
from paceline.target.steps import FusedStep
from tests.decoder.steps import STEPS, draft, inputs, verify
from tests.decoder.tiny import Workshop

CASES = (
    "draft, PARD",
    "fused DFlash",
    "fused DFlash 2",
    "fused DSpark",
    "prefill",
    "keep",
    "verify, reject, drawn",
    "verify, dynamic tree",
    "draft",
    "fused medusa",
    "fused eagle 3",
)


@pytest.fixture(scope="module")
def body(workshop: Workshop) -> ModelWithCache:
    decoder = workshop.decoder()
    weights = {name: value.clone() for name, value in network_weights(workshop).items()}
    made = ModelWithCache(decoder.config, decoder.options, weights, kernels=TraceableKernels()).eval()
    for cache in made.caches:
        for part in cache:
            torch.nn.init.normal_(part)
    return made


def network_weights(workshop: Workshop) -> dict[str, Tensor]:
    decoder = workshop.decoder()
    assert decoder.folder is not None
    return load_weights(decoder.folder, decoder.config, decoder.options.dtype)


def test_all_ranks_of_a_divided_model_have_the_same_graph(workshop: Workshop) -> None:
    """An accelerator is given one graph; what differs between ranks are weights and buffers."""
    path, graphs = workshop.checkpoint(), []
    config = ModelConfig.from_pretrained(path)
    layout = sharding.layout(config, 4, "all-gather-heads")
    options = replace(workshop.decoder().options, layout=layout)
    for rank in (0, 3):
        weights = load_weights(path, config, options.dtype, shard=Shard(config, layout, rank))
        body = ModelWithCache(
            config, options, weights, kernels=TraceableKernels(), rank=rank, group=DeviceGroup(4)
        ).eval()
        lowered = lower("prefill", STEPS["prefill"](body, 128), inputs("prefill", 1))
        assert graph_lint.lint(lowered) == []
        graphs.append(lowered.graph.code)
    assert graphs[0] == graphs[1]
    # For the embedding a sum, for the logits a gather; for each of two layers two sums, and a gather of K/V heads.
    assert [graphs[0].count(f"{name}.default(") for name in ("all_reduce", "all_gather_into_tensor")] == [5, 3]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, body: ModelWithCache) -> tuple[str, nn.Module, Lowered]:
    name = request.param
    step = STEPS[name](body, 128)
    return name, step, lower(name, step, inputs(name, 1))


Made = tuple[str, nn.Module, Lowered]


def copies(step: nn.Module, lowered: Lowered) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state_of(step, lowered).items()}


def test_a_lowered_step_computes_what_the_step_computes_and_changes_the_same_caches(made: Made) -> None:
    name, step, lowered = made
    for seed in (2, 3, 4):
        given = inputs(name, seed)
        state = copies(step, lowered)
        changed, outputs = lowered.run(state, given)
        with torch.no_grad():
            wanted = step(*given)
        after = state_of(step, lowered)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(outputs, wanted, strict=True))
        assert set(changed) == {n for n in state if not torch.equal(state[n], after[n])} != set()
        for n, value in changed.items():
            # A head's guesses pass through several products, which the rewritten graph may sum in another order.
            torch.testing.assert_close(value, after[n], rtol=0, atol=1e-4 if "head" in n else 0)


def test_no_finding(made: Made) -> None:
    assert graph_lint.lint(made[2]) == []


def test_other_values_give_the_same_graph(body: ModelWithCache) -> None:
    for name in ("prefill", "window"):
        step = STEPS[name](body, 128)
        texts = {str(lower(name, step, inputs(name, seed)).graph.code) for seed in (5, 6)}
        assert len(texts) == 1


@pytest.mark.parametrize("row", [0, 127 - 2, 127 - 1, 127, 128, 140])
def test_every_row_number_is_in_range_at_the_ends_of_a_cache(made: Made, row: int) -> None:
    """Also for rows past the end, which a slot without a request may name: they are pulled back."""
    name, step, lowered = made
    if name in {"prefill", "keep"} and row > 127:
        pytest.skip("a prompt is never read past the last position")
    state = copies(step, lowered)
    seen = Indices(lowered.graph)
    seen.run(*(state[n] for n in lowered.state), *inputs(name, 7, row=row))
    assert seen.checked >= 7


@pytest.mark.parametrize(("name", "rows"), [("prefill", [0, 64 - 16]), ("window, tree", [0, 64 - 3, 63, 64, 127, 140])])
def test_rows_are_in_range_at_the_ends_of_a_smaller_bucket_too(
    body: ModelWithCache, name: str, rows: list[int]
) -> None:
    """A chunk of a prompt never crosses a border; a slot without a request may name any row."""
    step = STEPS[name](body, 64)
    lowered = lower(name, step, inputs(name, 1))
    for row in rows:
        seen = Indices(lowered.graph)
        seen.run(*(copies(step, lowered)[n] for n in lowered.state), *inputs(name, 7, row=row))
        assert seen.checked >= 6


@pytest.mark.parametrize("at", [-1, 2])
@pytest.mark.parametrize("operation", ["index_select", "embedding", "index_put"])
def test_an_index_out_of_range_is_found(operation: str, at: int) -> None:
    """A graph that takes its row from its input, one before the first row and one behind the last."""

    def chosen(module: nn.Module, x: Tensor) -> Tensor:
        state, row = module.get_buffer("state"), x[0, :1].to(torch.int32)
        if operation == "index_select":
            return state.index_select(0, row)
        if operation == "embedding":
            return nn.functional.embedding(row, state)
        state.index_put_((row,), x[:1])
        return x + 1

    step = Broken(chosen)
    lowered = lower("broken", step, (torch.zeros(2, 4),))
    state = [copies(step, lowered)[n] for n in lowered.state]
    Indices(lowered.graph).run(*state, torch.ones(2, 4))
    with pytest.raises(AssertionError, match=operation):
        Indices(lowered.graph).run(*state, torch.full((2, 4), float(at)))


class Indices(fx.Interpreter):
    """Runs a graph and looks at every index before it is used."""

    checked = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target)
        found = {
            "aten.index_select.default": lambda: (args[2], args[0].shape[args[1]]),
            "aten.embedding.default": lambda: (args[1], args[0].shape[0]),
            "aten.index_put.default": lambda: (args[1][0], args[0].shape[0]),
        }.get(name)
        if found is not None:
            at, size = found()
            assert 0 <= int(at.min()) <= int(at.max()) < size, (name, int(at.min()), int(at.max()), size)
            self.checked += 1
        assert "gather" not in name and "scatter" not in name and name != "aten.index.Tensor"
        return super().call_function(target, args, kwargs)


class Broken(nn.Module):
    """A module with one state and whatever function breaks a rule."""

    def __init__(self, function: Any, state: Tensor | None = None) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(2, 4) if state is None else state)
        self.register_buffer("narrow", torch.zeros(4, 4, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.function(self, x),)


def held(module: nn.Module, x: Tensor) -> Tensor:
    module.get_buffer("state").copy_(module.get_buffer("state"))
    return x + 1


BREAKING: dict[str, tuple[Any, str]] = {
    "sort": (lambda _m, x: x.sort(-1).values, "operator"),
    "topk": (lambda _m, x: x.topk(2).values, "operator"),
    "argmax": (lambda _m, x: x.argmax(-1).to(torch.int32), "operator"),
    "random": (lambda _m, x: x + torch.rand_like(x), "operator"),
    "float64": (lambda _m, x: x.double().sum().float(), "64 bits"),
    "infinity": (lambda _m, x: torch.where(x > 0, x, float("-inf")), "infinite constant"),
    "integer dot": (lambda _m, x: x.to(torch.int32) @ torch.ones(4, 3, dtype=torch.int32), "integer dot"),
    "widened weight": (lambda m, x: x @ m.get_buffer("narrow").float(), "widened weight"),
    "not a number": (lambda _m, x: x + torch.tensor([1.0, 2.0, 3.0, float("nan")]), "infinite constant"),
    "nothing changed": (held, "alias"),
    "no dimension": (lambda _m, x: x.sum(dim=[]), "empty reduction"),
    "no dimension of a maximum": (lambda _m, x: torch.amax(x, dim=[]), "empty reduction"),
    "a shift by a number": (lambda _m, x: x.to(torch.int32) << 3, "bitwise number"),
    "integers divided": (lambda _m, x: x.to(torch.int32) // 3, "integer division"),
    "shape of data": (lambda _m, x: x.nonzero(), "dynamic dimension"),
}


def test_a_graph_neither_holds_its_state_nor_writes_into_it() -> None:
    lowered = lower("fine", Broken(lambda _m, x: x + 1), (torch.randn(2, 4),))
    assert graph_lint.lint(lowered) == []
    graph = lowered.graph.graph
    (x,) = (node for node in graph.find_nodes(op="placeholder") if node.name == "x")
    lowered.graph.register_buffer("cache", torch.zeros(2, 4))
    with graph.inserting_after(x):
        graph.get_attr("cache")
        graph.call_function(torch.ops.aten.add_.Tensor, (x, x)).meta["val"] = x.meta["val"]
    assert {"held state", "write in place"} <= {finding.rule for finding in graph_lint.lint(lowered)}


@pytest.mark.parametrize("case", BREAKING)
def test_every_rule_finds_what_breaks_it(case: str) -> None:
    function, rule = BREAKING[case]
    lowered = lower(case, Broken(function), (torch.randn(2, 4),))
    assert rule in {finding.rule for finding in graph_lint.lint(lowered)}


@pytest.mark.parametrize(
    "function",
    [
        lambda _m, x: x[x > 0],
        lambda _m, x: x * 2 if float(x.sum()) > 0 else x,
        lambda _m, x: x[:, torch.tensor([0, 1])],
    ],
)
def test_what_depends_on_values_or_indexes_in_other_ways_is_refused(function: Any) -> None:
    with pytest.raises(BackendError, match="broken: tracing failed"):
        lower("broken", Broken(function), (torch.randn(2, 4),))


def test_constants_made_while_tracing_are_named() -> None:
    lowered = lower("constant", Broken(lambda _m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0])), (torch.randn(2, 4),))
    (value,) = constants_of(lowered).values()
    assert value.tolist() == [1, 2, 3, 4]
    assert graph_lint.lint(lowered) == []


def test_one_decoder_on_both_sides_of_a_fused_round_is_refused_with_the_remedy(body: ModelWithCache) -> None:
    both = FusedStep(draft(body, 128, drawn=False), verify(body, 128))
    with pytest.raises(BackendError, match="load it twice, or pass fused=False"):
        lower("fused", both, inputs("fused", 1))
