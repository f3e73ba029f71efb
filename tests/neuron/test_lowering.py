"""Lowered steps: pure graphs that compute the same, in operations that compilers take, with every index in range."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from paceline.core import noise, reduce
from paceline.core.errors import BackendError
from paceline.core.sampling import seed_row
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.parallel import sharding
from paceline.decoder.steps import WindowStep
from paceline.neuron import graph_lint, graph_product, lowering
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, constants_of, lower, state_of
from paceline.target.steps import FusedStep
from tests.decoder.families import FAMILIES, POSITIONS, WINDOW, network
from tests.decoder.steps import STEPS, draft, inputs, traceable, verify
from tests.decoder.test_families import TEXT, loaded, wanted
from tests.decoder.tiny import Workshop, fresh
from tests.docs.pages import ROOT
from tests.neuron.conftest import Widened

CASES = (
    "draft, PARD", "fused DFlash", "fused DFlash 2", "fused DSpark", "prefill", "keep", "reorder", "move",
    "verify, reject, drawn", "verify, dynamic tree", "draft", "fused medusa", "fused eagle 3", "fused eagle 3.1",
    "fused P-EAGLE", "fused MTP", "fused MLP speculator", "fused LayerSkip", "fused Gemma 4 assistant",
)  # fmt: skip


@pytest.fixture(scope="module")
def body(workshop: Workshop) -> ModelWithCache:
    made = traceable(workshop.decoder())
    for cache in made.caches:
        for part in cache:
            torch.nn.init.normal_(part)
    return made


def test_all_ranks_have_the_same_graph(workshop: Workshop) -> None:
    """An accelerator is given one graph; what differs between ranks are weights and buffers."""
    decoder, graphs = workshop.decoder(), []
    for rank in (0, 3):
        body = traceable(decoder, layout=sharding.layout(decoder.config, 4, "all-gather-heads"), rank=rank)
        lowered = lower("prefill", STEPS["prefill"](body, 128), inputs("prefill", 1))
        assert graph_lint.lint(lowered) == []
        graphs.append(lowered.graph.code)
    assert graphs[0] == graphs[1]
    # For the embedding a sum, for the logits a gather; for each of two layers two sums, and a gather of K/V heads.
    assert [graphs[0].count(f"{name}.default(") for name in ("all_reduce", "all_gather_into_tensor")] == [5, 3]


def test_every_class_of_steps_is_among_those_that_are_lowered(body: ModelWithCache) -> None:
    """All compilers' tests go over `STEPS`."""
    found = {
        kind.__name__ for make in STEPS.values() for part in make(body, 128).modules() for kind in type(part).__mro__
    }
    folders = ("decoder", "draft", "eagle", "medusa", "target")
    text = "\n".join(file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r"^class (\w+Step)\(nn.Module", text, re.MULTILINE))
    assert len(named) > 10 and not named - found


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, body: ModelWithCache) -> tuple[str, nn.Module, Lowered]:
    name = request.param
    step = STEPS[name](body, 128)
    return name, step, lower(name, step, inputs(name, 1))


Made = tuple[str, nn.Module, Lowered]


def copies(step: nn.Module, lowered: Lowered) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state_of(step, lowered).items()}


def test_a_lowered_step_equals_the_step_and_writes_the_same_caches(made: Made) -> None:
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


def test_lowered_graphs_have_no_lint_finding(made: Made) -> None:
    assert graph_lint.lint(made[2]) == []


@pytest.mark.parametrize("row", [0, 127 - 2, 127 - 1, 127, 128, 140])
def test_every_row_number_is_in_range_at_the_ends_of_a_cache(made: Made, row: int) -> None:
    """Also for rows past the end, which a slot without a request may name: they are pulled back."""
    name, step, lowered = made
    if name in {"prefill", "keep"} and row > 127:
        pytest.skip("a prompt is never read past the last position")
    state = copies(step, lowered)
    seen = Indices(lowered.graph)
    seen.run(*(state[n] for n in lowered.state), *inputs(name, 7, row=row))
    assert seen.checked >= (4 if name == "reorder" else 7)


@pytest.mark.parametrize(("name", "rows"), [("prefill", [0, 64 - 16]), ("window, tree", [0, 64 - 3, 63, 64, 127, 140])])
def test_rows_are_in_range_at_the_ends_of_a_smaller_bucket(body: ModelWithCache, name: str, rows: list[int]) -> None:
    """A chunk of a prompt never crosses a border; a slot without a request may name any row."""
    step = STEPS[name](body, 64)
    lowered = lower(name, step, inputs(name, 1))
    for row in rows:
        seen = Indices(lowered.graph)
        seen.run(*(copies(step, lowered)[n] for n in lowered.state), *inputs(name, 7, row=row))
        assert seen.checked >= 6


@pytest.mark.parametrize("at", [-1, 2])
@pytest.mark.parametrize(
    ("operation", "chosen"),
    [
        ("index_select", lambda state, row, _x: state.index_select(0, row)),
        ("embedding", lambda state, row, _x: nn.functional.embedding(row, state)),
        ("index_put", lambda state, row, x: state.index_put_((row,), x[:1]) + x),
    ],
)
def test_an_index_out_of_range_is_found(operation: str, chosen: Any, at: int) -> None:
    """A graph that takes its row from its input, one before the first row and one after the last."""
    step = Broken(lambda module, x: chosen(module.get_buffer("state"), x[0, :1].to(torch.int32), x))
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

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(2, 4))
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


def test_a_graph_takes_and_returns_its_state() -> None:
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
def test_every_rule_finds_a_violation(case: str) -> None:
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
def test_value_dependent_steps_are_rejected(function: Any) -> None:
    with pytest.raises(BackendError, match="broken: tracing failed"):
        lower("broken", Broken(function), (torch.randn(2, 4),))


def test_constants_made_while_tracing_are_named() -> None:
    lowered = lower("constant", Broken(lambda _m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0])), (torch.randn(2, 4),))
    (value,) = constants_of(lowered).values()
    assert value.tolist() == [1, 2, 3, 4]
    assert graph_lint.lint(lowered) == []


def test_one_decoder_may_be_draft_and_target_of_a_fused_round(body: ModelWithCache) -> None:
    """The exporter follows the cache's changes by one path, and the step is unchanged afterwards."""
    both = FusedStep(draft(body, 128, drawn=False), verify(body, 128))
    before = [name for name, _ in both.named_modules(remove_duplicate=False)]
    assert graph_lint.lint(lower("fused", both, inputs("fused", 1))) == []
    assert [name for name, _ in both.named_modules(remove_duplicate=False)] == before


def test_float_bits_equal_the_machines() -> None:
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    numbers = word.view(torch.float32)
    numbers = numbers[torch.isfinite(numbers) & (numbers.abs() >= 2.0**-126)]
    edges = [2.0**p * s for p in range(-126, 128) for s in (1, -1)] + [0.0, reduce.NEGATIVE, -1 + 2**-24, 3.4e38]
    numbers = torch.cat((numbers, torch.tensor(edges), torch.nextafter(torch.tensor(edges[:508]), torch.tensor(0.9))))
    numbers = numbers[(numbers == 0) | (numbers.abs() >= 2.0**-126)]
    assert torch.equal(lowering.view_as(numbers, torch.int32), numbers.view(torch.int32))
    small = torch.tensor([2.0**-140, -(2.0**-149), -0.0])
    assert lowering.view_as(small, torch.int32).tolist() == [0, 0, 0]


def test_a_right_shift_rounds_down() -> None:
    word = torch.tensor([-5, -1, 0, 7, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    for by in (1, 3, 12, 16, 31):
        assert torch.equal(lowering.shift_right(word, by), word >> by)


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 1000, 128 * 128 + 1])
def test_a_running_count_is_exact(size: int) -> None:
    marks = (torch.rand(3, size, generator=torch.Generator().manual_seed(size)) < 0.5).to(torch.float32)
    assert torch.equal(lowering.cumsum(marks, -1), marks.cumsum(-1))
    assert torch.equal(lowering.cumsum(marks, 0), marks.cumsum(0))


def test_gather_takes_the_leading_part_like_pytorch() -> None:
    x = torch.randn(3, 5, 7)
    for dim, index in (
        (1, torch.randint(0, 5, (2, 4, 6))),
        (2, torch.randint(0, 7, (3, 5, 1))),
        (-1, torch.tensor([[[6]]])),
    ):
        assert torch.equal(lowering.gather(x, dim, index), x.gather(dim, index))
    ids = torch.randint(-(1 << 20), 1 << 20, (3, 5), dtype=torch.int32)
    found = lowering.gather(ids, 1, torch.tensor([[4], [0], [2]]))
    assert found.dtype == torch.int32 and torch.equal(found, ids.gather(1, torch.tensor([[4], [0], [2]])))


def test_rows_are_selected_as_by_an_index() -> None:
    table, at = torch.randn(9, 4), torch.randint(0, 9, (2, 3), dtype=torch.int32)
    assert torch.equal(lowering.index(table, [at]), table[at])
    for wrong in ([None], [at > 3]):
        with pytest.raises(BackendError, match="one tensor of row numbers"):
            lowering.index(table, wrong)
    with pytest.raises(BackendError, match="bits of float32"):
        lowering.view_as(table.double(), torch.int32)


def test_noise_is_bitwise_identical_in_lowered_graphs() -> None:
    """All of it, over every kind of position and key."""
    keys = torch.tensor([seed_row(1), seed_row(-7)], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 4095], [77, 1 << 20, 3]], dtype=torch.int32)

    class Noise(torch.nn.Module):
        def forward(self, keys: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
            return (noise.gumbel(keys, positions, 1000, traced=True),)

    lowered = lower("noise", Noise(), (keys, positions))
    _, (found,) = lowered.run(constants_of(lowered), (keys, positions))
    assert torch.equal(found, noise.gumbel(keys, positions, 1000, traced=True))


def test_lowered_activations_are_near_pytorchs() -> None:
    x = torch.cat((torch.linspace(-12, 12, 100_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0])))
    for kind in ("none", "tanh"):
        wanted = torch.nn.functional.gelu(x.double(), approximate=kind)
        error = (lowering.gelu(x, approximate=kind).double() - wanted).abs()
        assert float((error / x.double().abs().clamp(min=1)).max()) < 2e-7
    assert torch.equal(lowering.relu(x), torch.relu(x))
    scores = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * 30
    torch.testing.assert_close(lowering.softmax(scores, -1), scores.softmax(-1), rtol=1e-6, atol=1e-7)


def step(workshop: Workshop, kernels: TraceableKernels) -> WindowStep:
    decoder = fresh(workshop.checkpoint(), backend="eager", amp="bf16", batch_size=4)
    return WindowStep(traceable(decoder, kernels=kernels), 64)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_matmuls_round_their_inputs_and_not_the_sum(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 2, 64), torch.randn(5, 64).to(kind)
    wanted = torch.einsum("btk,mk->btm", x.to(kind).double(), weight.double())
    found = graph_product.linear(x, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, found.to(kind).float()), "a sum of 16 bits would be"
    y = torch.randn(3, 7, 64).to(kind)
    torch.testing.assert_close(
        graph_product.matmul(x, y).double(), x.to(kind).double() @ y.double().transpose(1, 2), rtol=1e-5, atol=1e-5
    )


def test_steps_do_not_widen_16_bit_weights(workshop: Workshop) -> None:
    example = (torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    rules = [
        {finding.rule for finding in graph_lint.lint(lower("window", step(workshop, kernels), example))}
        for kernels in (TraceableKernels(), Widened())
    ]
    assert rules == [set(), {"widened weight"}]


NODES = 16
PARENTS = [*range(-1, NODES - 2), NODES - 3]  # a chain longer than a sliding window, whose last two are siblings
assert NODES > WINDOW + 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_of_every_family_is_a_graph(tmp_path: Path, name: str) -> None:
    layers = 2 if "layer_types" in FAMILIES[name][1] else 1  # a sliding layer and a full one, where layers differ
    network(name, layers=layers).save_pretrained(tmp_path)
    step, tokens = WindowStep(traceable(loaded(tmp_path)), POSITIONS), TEXT[:1, :NODES].int()
    given = (tokens, torch.zeros(1, dtype=torch.int32), torch.tensor([PARENTS], dtype=torch.int32))
    lowered = lower("window, tree", step, given)
    assert graph_lint.lint(lowered) == []
    state = {name: value.detach().clone() for name, value in state_of(step, lowered).items()}
    (logits,) = lowered.run(state, given)[1]
    torch.testing.assert_close(logits[:, :-1], wanted(tmp_path, TEXT[:1, : NODES - 1]), atol=1e-4, rtol=1e-4)
    other = torch.cat((TEXT[:1, : NODES - 2], TEXT[:1, NODES - 1 : NODES]), 1)
    torch.testing.assert_close(logits[:, -1], wanted(tmp_path, other)[:, -1], atol=1e-4, rtol=1e-4)
