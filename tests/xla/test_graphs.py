"""Every kind of graph as HLO: it lowers, nothing in it is known to be rejected by Neuron, and values leave no trace."""

from __future__ import annotations

import hashlib

import pytest
from torch import nn

from paceline import AutoDecoder
from paceline.neuron import hlo_lint
from tests.decoder.steps import STEPS, inputs
from tests.decoder.tiny import KINDS, Workshop
from tests.xla.hlo_text import MAX_INSTRUCTIONS, census, hlo, lint

BUDGETS = {
    "prefill": 1_000, "prefill, states": 750, "window": 700, "window, tree": 1_100, "keep": 400,
    "verify": 2_750, "verify nothing": 2_550, "verify, reject, drawn": 4_400, "verify, typical": 4_400,
    "verify, tree": 3_350, "verify, dynamic tree": 3_350, "draft": 4_900, "draft, drawn": 7_450,
    "draft, some known": 5_100, "fused": 7_650, "plain": 7_300, "fused medusa": 5_350, "fused medusa, kept": 5_350,
    "eagle 3 reads": 250, "fused eagle 1": 7_050, "fused eagle 1, static tree": 7_850,
    "fused eagle 2": 8_500, "fused eagle 3": 8_500, "fused eagle 3, chain": 7_050,
    "fused eagle 3, static tree": 7_900,
}  # fmt: skip
"""HLO instructions of each graph at most: what it has, with about a tenth of room.

Steps of later drafters have not been counted. Prefill and window of a tree have more: other kinds of models are held to
them too.
"""


@pytest.fixture(scope="module", params=STEPS)
def graph(request: pytest.FixtureRequest, workshop: Workshop) -> tuple[str, nn.Module, str]:
    body = workshop.decoder(backend="xla").body
    name = request.param
    step = STEPS[name](body, 128)
    return name, step, hlo(name, step, inputs(name, 1))


Made = tuple[str, nn.Module, str]


def test_xla_graphs_have_no_lint_finding(graph: Made) -> None:
    name, _, text = graph
    found = lint(text, budget=BUDGETS.get(name, MAX_INSTRUCTIONS))
    counts = census(text)
    beyond = sorted(set(counts) - hlo_lint.LISTED)
    print(f"{name}: {sum(counts.values())} instructions, {len(found)} findings; beyond the list: {', '.join(beyond)}")
    assert found == []
    assert set(beyond) <= set(hlo_lint.ALLOWED), "an operator is either on the published list, or waived by name"


@pytest.mark.parametrize(("form", "kind"), [("int8", "s8"), ("fp8_e4m3", "f8e4m3fn")], ids=lambda x: str(x))
def test_eight_bit_weights_are_parameters_of_their_type(workshop: Workshop, form: str, kind: str) -> None:
    decoder = AutoDecoder.from_pretrained(
        workshop.checkpoint(), backend="xla", batch_size=4, context_length_estimate=[16], quantization=form
    )
    text = hlo("verify", STEPS["verify"](decoder.body, 128), inputs("verify", 1))
    assert lint(text) == []
    held = [line for line in text.splitlines() if f" = {kind}[" in line and " parameter(" in line]
    assert len(held) >= 2 * 4, "the matrices of two layers"


def test_other_values_give_the_same_module(graph: Made) -> None:
    name, step, text = graph
    other = hlo(name, step, inputs(name, 2))
    assert hashlib.sha256(other.encode()).digest() == hashlib.sha256(text.encode()).digest()


def test_changed_state_is_returned_first(graph: Made) -> None:
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


@pytest.mark.parametrize(
    ("kind", "amp"), [*((kind, "f32") for kind in KINDS if kind != "grouped"), ("grouped", "bf16"), ("grouped", "f16")]
)
def test_graphs_of_other_models_have_no_lint_finding(workshop: Workshop, kind: str, amp: str) -> None:
    """Biases, tied tables, scaled positions, one K/V head, and weights and caches of 16 bits."""
    body = workshop.decoder(backend="xla", kind=kind, amp=amp).body
    for name in ("prefill", "window, tree"):
        found = hlo(name, STEPS[name](body, 128), inputs(name, 1))
        assert lint(found, budget=BUDGETS[name]) == []
