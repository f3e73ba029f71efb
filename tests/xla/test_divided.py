"""The graphs of a divided model as HLO: its collectives are XLA's own, and every rank's module is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.decoder.backends.base import Graph
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.collectives import DeviceGroup
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.neuron import xla
from paceline.neuron.kernels import TraceableKernels
from tests.decoder.steps import STEPS, inputs
from tests.decoder.tiny import Workshop
from tests.xla.hlo_text import census, lint

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
def test_no_finding_and_one_module_for_all_ranks(workshop: Workshop, name: str, gqa: str) -> None:
    if gqa == "all-gather-heads" and name.startswith("fused "):
        pytest.skip("heads see nothing of where the target's K/V heads live")
    path = workshop.checkpoint()
    config = ModelConfig.from_pretrained(path)
    layout = sharding.layout(config, DEGREE, gqa)
    options = replace(workshop.decoder(backend="eager").options, layout=layout)
    texts = []
    for rank in (0, DEGREE - 1) if name == "prefill" else (0,):
        weights = load_weights(path, config, options.dtype, shard=Shard(config, layout, rank))
        body = ModelWithCache(
            config, options, weights, kernels=TraceableKernels(), rank=rank, group=DeviceGroup(DEGREE)
        ).eval()
        with torch.no_grad():
            texts.append(
                xla.hlo(Graph(GraphKey(name), STEPS[name](body, 128), inputs(name, 1), {}), ranks=xla.XlaGroup(DEGREE))
            )
    found, counts = lint(texts[0], budget=BUDGETS[name]), census(texts[0])
    print(f"{name}, {gqa}: {sum(counts.values())} instructions, {len(found)} findings")
    assert found == []
    if name == "prefill":
        assert texts[0] == texts[1]
        # For the embedding and twice a layer a sum; a gather for the logits, and for K/V heads.
        assert (counts["all-reduce"], counts["all-gather"]) == (5, 3 if gqa == "all-gather-heads" else 1)
