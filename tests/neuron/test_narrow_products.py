"""Products of 16-bit weights as graphs compute them: no weight is widened, and greedy tokens are those of float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.steps import WindowStep
from paceline.decoder.weights.checkpoint import load_weights
from paceline.neuron import graph_lint, graph_product
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import lower
from tests.decoder.tiny import VOCABULARY, Workshop, fresh


class Widened(TraceableKernels):
    """Activations stay float32, and every weight is made float32."""

    def linear(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight.to(torch.float32))


def step(workshop: Workshop, kernels: TraceableKernels) -> WindowStep:
    decoder = fresh(workshop.checkpoint(), backend="eager", amp="bf16", batch_size=4)
    weights = load_weights(decoder.folder, decoder.config, decoder.options.dtype)
    return WindowStep(ModelWithCache(decoder.config, decoder.options, weights, kernels=kernels).eval(), 64)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_products_round_what_is_multiplied_and_not_the_sum(kind: torch.dtype) -> None:
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


def test_no_step_of_16_bit_weights_widens_them(workshop: Workshop) -> None:
    example = (torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    rules = [
        {finding.rule for finding in graph_lint.lint(lower("window", step(workshop, kernels), example))}
        for kernels in (TraceableKernels(), Widened())
    ]
    assert rules == [set(), {"widened weight"}]


def test_greedy_tokens_of_both_are_nearly_always_the_same(workshop: Workshop) -> None:
    torch.manual_seed(0)
    tokens, row = torch.randint(VOCABULARY, (4, 48), dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with torch.no_grad():
        narrow, wide = (step(workshop, kernels)(tokens, row)[0] for kernels in (TraceableKernels(), Widened()))
    assert narrow.dtype == torch.float32
    assert not torch.equal(narrow, wide)
    agreement = (narrow.argmax(-1) == wide.argmax(-1)).float().mean().item()
    print(
        f"{agreement:.4f} of {tokens.numel()} greedy tokens agree; largest difference {(narrow - wide).abs().max():.3g}"
    )
    assert agreement > 0.95
