"""Every family as graphs for accelerators: in operators that compilers take, with the logits of transformers.

A family's tokens in every mode are compared on eager (`test_families.py`), its speed nowhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.steps import WindowStep
from paceline.decoder.weights.checkpoint import load_weights
from paceline.neuron import graph_lint
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import lower, state_of
from tests.decoder.families import FAMILIES, POSITIONS, WINDOW, network
from tests.decoder.test_families import TEXT, loaded, wanted

NODES = 16
PARENTS = [*range(-1, NODES - 2), NODES - 3]  # a chain longer than a sliding window, whose last two are siblings
assert NODES > WINDOW + 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_window_of_every_family_is_a_graph(tmp_path: Path, name: str) -> None:
    layers = 2 if "layer_types" in FAMILIES[name][1] else 1  # a sliding layer and a full one, where layers differ
    network(name, layers=layers).save_pretrained(tmp_path)
    decoder = loaded(tmp_path)
    weights = load_weights(tmp_path, decoder.config, torch.float32)
    body = ModelWithCache(decoder.config, decoder.options, weights, kernels=TraceableKernels()).eval()
    step, tokens = WindowStep(body, POSITIONS), TEXT[:1, :NODES].int()
    given = (tokens, torch.zeros(1, dtype=torch.int32), torch.tensor([PARENTS], dtype=torch.int32))
    lowered = lower("window, tree", step, given)
    assert graph_lint.lint(lowered) == []
    state = {name: value.detach().clone() for name, value in state_of(step, lowered).items()}
    (logits,) = lowered.run(state, given)[1]
    torch.testing.assert_close(logits[:, :-1], wanted(tmp_path, TEXT[:1, : NODES - 1]), atol=1e-4, rtol=1e-4)
    other = torch.cat((TEXT[:1, : NODES - 2], TEXT[:1, NODES - 1 : NODES]), 1)
    torch.testing.assert_close(logits[:, -1], wanted(tmp_path, other)[:, -1], atol=1e-4, rtol=1e-4)
