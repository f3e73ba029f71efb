"""The graphs of a divided model as HLO: its collectives are XLA's own, and every rank's module is the same."""

from __future__ import annotations

import pytest

from paceline.decoder.parallel import sharding
from tests.decoder.steps import STEPS, inputs, traceable
from tests.decoder.tiny import Workshop
from tests.xla.hlo_text import census, hlo, lint

DEGREE = 4
BUDGETS = {
    "prefill": 860,
    "fused": 8_850,
    "fused medusa": 6_200,
    "fused eagle 1": 8_100,
    "fused eagle 3, chain": 8_100,
    "fused eagle 3": 9_900,
}
"""HLO instructions at most, as in `test_graphs.py`."""


@pytest.mark.parametrize("gqa", ["replicated-heads", "all-gather-heads"])
@pytest.mark.parametrize("name", BUDGETS)
def test_tensor_parallel_graphs_have_no_finding_and_one_module(workshop: Workshop, name: str, gqa: str) -> None:
    if gqa == "all-gather-heads" and name.startswith("fused "):
        pytest.skip("heads see nothing of where the target's K/V heads live")
    decoder, texts = workshop.decoder(backend="eager"), []
    layout = sharding.layout(decoder.config, DEGREE, gqa)
    for rank in (0, DEGREE - 1) if name == "prefill" else (0,):
        body = traceable(decoder, layout=layout, rank=rank)
        texts.append(hlo(name, STEPS[name](body, 128), inputs(name, 1), degree=DEGREE))
    found, counts = lint(texts[0], budget=BUDGETS[name]), census(texts[0])
    print(f"{name}, {gqa}: {sum(counts.values())} instructions, {len(found)} findings")
    assert found == []
    if name == "prefill":
        assert texts[0] == texts[1]
        # For the embedding and twice a layer a sum; a gather for the logits, and for K/V heads.
        assert (counts["all-reduce"], counts["all-gather"]) == (5, 3 if gqa == "all-gather-heads" else 1)
