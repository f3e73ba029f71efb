"""TorchNeuron's own passes over our graphs, where a machine has its source; nothing of it is in this repository.

PACELINE_TORCHNEURON_SOURCE names a folder that holds ``torch_neuronx``. Its passes in pure Python run as its pipelines
run them, before and after AOTAutograd (neuron_dynamo_backend/fx/pipelines, 2026-04-21): static shapes, aliases, writes
into inputs that become outputs. What they need of its C++ library does not run.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from paceline.decoder.decoder import ModelWithCache
from paceline.neuron.lowering import lower, state_of
from paceline.neuron.native import in_place
from tests.decoder.steps import SAMPLED, STEPS, inputs, traceable
from tests.decoder.tiny import Workshop

SOURCE = os.environ.get("PACELINE_TORCHNEURON_SOURCE")
PASSES = "torch_neuronx.neuron_dynamo_backend.fx.passes"

pytestmark = pytest.mark.skipif(
    SOURCE is None, reason="PACELINE_TORCHNEURON_SOURCE is not set: it names a folder that holds torch_neuronx"
)


@pytest.fixture(scope="module")
def body(workshop: Workshop) -> ModelWithCache:
    return traceable(workshop.decoder(backend="eager"))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The passes by their class; packages are imported without their own ``__init__``, which asks for a device."""
    for name in ("torch_neuronx", "torch_neuronx.neuron_dynamo_backend", PASSES.rpartition(".")[0], PASSES):
        package = ModuleType(name)
        package.__path__ = [str(Path(str(SOURCE), *name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    wanted = {
        "aliasing_analysis": "AliasingAnalysis",
        "dynamic_shape_analysis": "DynamicShapeAnalysis",
        "functionalize_copy_inplace_result": "FunctionalizeCopyInplacePass",
        "remove_none_outputs": "RemoveNoneOutputs",
    }
    made = {name: getattr(importlib.import_module(f"{PASSES}.{file}"), name) for file, name in wanted.items()}
    for name in [name for name in sys.modules if name.startswith("torch_neuronx.")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])  # removed with the packages
    return made


@pytest.mark.parametrize("name", STEPS)
def test_its_passes_keep_what_a_step_computes(body: ModelWithCache, passes: dict[str, Any], name: str) -> None:
    step, given = STEPS[name](body, 128, **({"kind": "greedy"} if name in SAMPLED else {})), inputs(name, 1)
    lowered = lower(name, step, given)
    state = {key: x.clone() for key, x in state_of(step, lowered).items()}
    seen: list[tuple[int, int]] = []

    def after(graph: fx.GraphModule, _example: list[Tensor]) -> Any:
        functional = passes["FunctionalizeCopyInplacePass"]()
        graph = passes["RemoveNoneOutputs"]()(functional(graph).graph_module).graph_module
        aliases = [(one.parameter_number, one.output_index) for one in functional.get_mutation_info()]
        assert not [node for node in graph.graph.nodes if "copy_" in str(node.target)]
        seen.extend(aliases)

        def run(*tensors: Tensor) -> list[Tensor]:
            results = list(graph(*tensors))
            for place, output in aliases:
                assert tensors[place].shape == results[output].shape and tensors[place].dtype == results[output].dtype
                tensors[place].copy_(results[output])
            return results[len(aliases) :]

        return make_boxed_func(run)

    def compiler(graph: fx.GraphModule, example: list[Tensor]) -> Any:
        before = passes["AliasingAnalysis"]()
        passes["DynamicShapeAnalysis"]()(before(graph).graph_module)
        return aot_autograd(fw_compiler=after, keep_inference_input_mutations=True)(graph, example)

    torch._dynamo.reset()
    with torch.no_grad():
        outputs = torch.compile(in_place(lowered, torch.device("cpu")), backend=compiler, fullgraph=True)(
            *state.values(), *given
        )
    changed, wanted = lowered.run({key: x.clone() for key, x in state_of(step, lowered).items()}, given)
    for made, right in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(made, right, rtol=0, atol=1e-4)
    assert len(seen) == len(changed) == len(set(seen)), "each changed state is an output that aliases its input"
    for key, right in changed.items():
        torch.testing.assert_close(state[key], right, rtol=0, atol=1e-4)
