"""The graphs for TorchNeuron, through torch_xla's export: as HLO they break no rule, and all of it has a form in
StableHLO, which is what TorchNeuron's compiler reads. Its own way is torch-mlir, which is not run in these tests.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.neuron import hlo_lint, xla
from paceline.neuron import native as neuron_native
from paceline.neuron.lowering import lower, state_of
from paceline.neuron.native import in_place
from tests.decoder.steps import STEPS, inputs
from tests.decoder.tiny import Workshop
from tests.xla.hlo_text import lint
from tests.xla.test_graphs import BUDGETS

_OPERATION = re.compile(r"stablehlo\.(\w+)")
_STABLE = {"dot_general": "dot", "broadcast_in_dim": "broadcast", "return": "tuple"}


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The device's own top-k. A graph's code names what it calls, so that this has a name."""
    return xla._custom_topk(xla.device(), x, count)


@pytest.mark.parametrize("name", ["prefill", "window, tree", "fused", "fused eagle 3, chain"])
def test_a_torchneuron_graph_has_no_finding_and_lowers_to_stablehlo(
    workshop: Workshop, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, body = xla.device(), workshop.decoder(backend="xla").body
    # Top-k is a call of the device's own there, and no sort.
    monkeypatch.setattr(neuron_native, "topk", largest)
    step, example = STEPS[name](body, 128), inputs(name, 1)
    lowered = lower(name, step, example)
    graph = in_place(lowered, home.torch)
    state = {key: tensor.detach().to(home.torch) for key, tensor in state_of(step, lowered).items()}
    given = [x.to(home.torch) for x in example]
    home.library.sync()
    home.reset_counters()
    with torch.no_grad():
        outputs = graph(*state.values(), *given)
    assert not home.fallbacks()
    results = [*(state[key] for key in lowered.changed), *outputs]
    text: str = home.bridge._get_xla_tensors_hlo(results)
    assert lint(text, budget=BUDGETS[name]) == []
    model: Any = importlib.import_module("torch_xla.core.xla_model")
    stable: str = model.get_stablehlo(results)
    home.bridge._clear_pending_irs(str(home.torch))
    found = {_STABLE.get(operation, operation.replace("_", "-")) for operation in _OPERATION.findall(stable)}
    assert {"dot", "scatter", "exponential"} <= found
    assert found <= hlo_lint.LISTED | set(hlo_lint.ALLOWED), sorted(found - hlo_lint.LISTED - set(hlo_lint.ALLOWED))
