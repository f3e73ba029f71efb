"""All modes on an interpreter whose integers go through float32: the tokens are those of whole integers.

The graphs are those that accelerators get (`TraceableKernels`), run an operation at a time. The host's part of a round,
the tables of a draft among them, is not on the accelerator and computes as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.backends.registry import BACKENDS, BackendRow
from paceline.decoder.kernels.protocol import Kernels
from paceline.neuron.kernels import TraceableKernels
from tests.decoder import batched
from tests.decoder.headed import HEADED
from tests.decoder.tiny import Workshop, fresh
from tests.float32_integers import IntegersThroughFloat32

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 5]]
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "top-k": {"do_sample": True, "seed": 3, "temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    "full": {"do_sample": True, "seed": (1 << 64) - 5, "temperature": 0.9},
}
largest = [0]


class Float32Integers(Backend):
    """Runs the graphs of accelerators, every integer operation through float32."""

    name = "float32 integers"

    def __init__(self) -> None:
        self.kernels: Kernels = TraceableKernels()

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        def run(*inputs: Tensor) -> list[Tensor]:
            with torch.no_grad(), IntegersThroughFloat32() as seen:
                made = list(graph.module(*inputs))
            largest[0] = max(largest[0], seen.largest)
            return made

        return run


MODES = {name: batched.MODES[name] for name in ("plain", "n-grams", "model, fused", "model, two graphs", *HEADED)}
MODES["model, reject"] = lambda small, target, _folder: SpeculativeGenerator(small, target, k=2, acceptor="reject")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_keeps_tokens(
    mode: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "rounded", BackendRow("rounded", f"{__name__}:Float32Integers", "for this test"))
    seen, largest[0] = [], 0
    for backend in ("eager", "rounded"):
        draft, target = (fresh(workshop.checkpoint(one), backend=backend, batch_size=2) for one in ("draft", "target"))
        generator = MODES[mode](draft, target, tmp_path / backend)
        found = [
            generator.sample(PROMPTS, max_new_tokens=8, return_dict=True, **given)  # type: ignore[call-overload]
            for given in SAMPLING.values()
        ]
        seen.append([(one.sequences.tolist(), one.statistics.num_accepted_tokens_per_pos) for one in found])
    assert seen[0] == seen[1]
    assert (1 << 23) < largest[0] < (1 << 24)  # the noise ran there, and nothing was rounded
