"""Mixtures of experts: native kernels are right, no expert that no row chose is read, and ties have one rule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.plain import ACTIVATIONS, gate_with
from paceline.decoder.kernels.protocol import ExpertWeights, Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.experts import ChosenExperts, EveryExpert, MixtureOfExperts
from paceline.decoder.models.network import DecoderLayer
from paceline.decoder.native.ops import Native
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import PackedMatrix, quantize
from paceline.neuron.kernels import TraceableKernels
from tests.decoder.families import save_pair
from tests.decoder.other_kernels import numbers
from tests.decoder.tiny import load

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(6, 2, 33, 20), (8, 2, 96, 64), (128, 8, 64, 32), (1, 1, 16, 8), (3, 3, 40, 13)]
"""Experts, chosen ones, H and F; some odd, some below a vector."""
MOST = 64
NAN = float("nan")


def mixture(shape: tuple[int, int, int, int], dtype: torch.dtype, activation: str = "silu") -> ExpertWeights:
    experts, _, H, F = shape
    gate_up, down = numbers(experts * 2 * F, H, seed=1) / H**0.5, numbers(experts * H, F, seed=2) / F**0.5
    return ExpertWeights(gate_up.to(dtype), down.to(dtype), activation)


def quantised(weights: ExpertWeights, form: WeightFormat) -> ExpertWeights:
    gate_up, down = (PackedMatrix(quantize(one, form)) for one in (weights.gate_up, weights.down))  # type: ignore[arg-type]
    return replace(weights, gate_up=gate_up, down=down)


def shares_of(shape: tuple[int, int, int, int], rows: int = MOST) -> Tensor:
    """Different experts for every row, except that rows 3 to 6 use the same, and shares that are not powers of two."""
    experts, chosen, _, _ = shape
    scores = numbers(1, rows, experts, seed=3)
    scores[:, 3:7] = scores[:, 3:4]
    least = scores.topk(chosen, -1).values[..., -1:]
    return torch.where(scores >= least, scores.exp() / 7, 0.0)


def composed(kernels: Kernels, x: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor:
    """Every expert computes every row, and what it chose is added up in the order of experts."""
    total, experts = torch.zeros_like(x), shares.shape[-1]
    assert isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)
    biases = torch.zeros(len(weights.gate_up)) if weights.gate_up_bias is None else weights.gate_up_bias
    for number, (both, down, bias) in enumerate(
        zip(weights.gate_up.chunk(experts), weights.down.chunk(experts), biases.chunk(experts), strict=True)
    ):
        gated = gate_with(kernels.linear(x, both.contiguous()) + bias, weights.activation)
        out = kernels.linear(gated, down.contiguous())
        share = shares[..., number : number + 1]
        total = torch.where(share != 0, total + share * out, total)
    return total


def mixed(native: Native, x: Tensor, shares: Tensor, weights: ExpertWeights) -> Tensor:
    return native.mixture.experts(x, shares, weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_experts_equal_computing_every_expert(
    native: Native, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """Bit for bit, with an activation that has the same bits everywhere; so the order of the sum is that of experts."""
    weights, x, shares = mixture(shape, dtype, "relu"), numbers(1, MOST, shape[2]), shares_of(shape)
    found = mixed(native, x, shares, weights)
    assert torch.equal(found, composed(native, x, shares, weights))
    if dtype == torch.float32:
        torch.testing.assert_close(found, composed(TorchKernels(), x, shares, weights), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, TorchKernels().experts(x, shares, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gate_and_up_have_biases(native: Native, shape: tuple[int, int, int, int]) -> None:
    """With ones so large that the activation's bounds are met."""
    plain, x, shares = mixture(shape, torch.float32, "clamped swish"), numbers(1, 9, shape[2]), shares_of(shape, 9)
    assert isinstance(plain.gate_up, Tensor)
    weights = replace(plain, gate_up_bias=8 * numbers(len(plain.gate_up), seed=5))
    wanted = composed(TorchKernels(), x, shares, weights)
    for kernels in (native.mixture, TorchKernels()):
        torch.testing.assert_close(kernels.experts(x, shares, weights), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_expert_activation_equals_torch(native: Native, activation: str) -> None:
    weights, x, shares = mixture(SHAPES[0], torch.float32, activation), numbers(1, 9, 33), shares_of(SHAPES[0], 9)
    found = mixed(native, x, shares, weights)
    torch.testing.assert_close(found, composed(TorchKernels(), x, shares, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_rows_may_use_one_expert(native: Native, dtype: torch.dtype) -> None:
    weights, x, shares = mixture(SHAPES[1], dtype, "relu"), numbers(1, MOST, 96), torch.zeros(1, MOST, 8)
    shares[..., 5] = 0.7
    found = mixed(native, x, shares, weights)
    assert torch.equal(found, composed(native, x, shares, weights))
    assert torch.equal(found[:, :1], mixed(native, x[:, :1], shares[:, :1], weights))


def test_equal_weights_are_summed_in_expert_order(native: Native) -> None:
    """Three results whose sum is 1 in that order and 0 in the opposite one, next to rows that do without the second."""
    experts, H, F = 3, 8, 8
    gate_up, down = torch.zeros(experts * 2 * F, H), torch.zeros(experts * H, F)
    for number, result in enumerate((1e8, -1e8, 1.0)):
        gate_up[number * 2 * F, 0] = gate_up[number * 2 * F + F, 0] = 1.0  # gate and up are x[0] = 1
        down[number * H, 0] = result
    weights, x, shares = ExpertWeights(gate_up, down, "relu"), torch.ones(1, 6, H), torch.ones(1, 6, experts)
    shares[:, ::2, 1] = 0.0
    for order in (list(range(6)), [5, 0, 3], [1]):
        found = mixed(native, x[:, order], shares[:, order], weights)[0, :, 0]
        assert found.tolist() == [1.0 if i % 2 else 1e8 for i in order]


@pytest.mark.parametrize("side", ["native", "torch"])
@pytest.mark.parametrize("width", [1, 5, 64])
def test_an_inactive_expert_is_not_read(native: Native, width: int, side: str) -> None:
    """Its weights are not numbers: a share of 0 would not hide that, as the sum over all experts shows."""
    shape = (8, 2, 96, 64)
    weights, x, shares = mixture(shape, torch.float32), numbers(1, width, 96), shares_of(shape, width)
    shares[..., [0, 6]] = 0.0
    clean = mixed(native, x, shares, weights)
    assert isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)
    for number in (0, 6):
        weights.gate_up.chunk(8)[number].fill_(NAN)
        weights.down.chunk(8)[number].fill_(NAN)
    if side == "native":
        assert torch.equal(mixed(native, x, shares, weights), clean)
    else:
        torch.testing.assert_close(TorchKernels().experts(x, shares, weights), clean, rtol=1e-4, atol=1e-5)
    gate, up = (x @ weights.gate_up.view(8, 2, 64, 96)[:, side].transpose(1, 2) for side in (0, 1))
    every = (torch.nn.functional.silu(gate) * up) @ weights.down.view(8, 96, 64).transpose(1, 2)
    assert (shares[0].T.unsqueeze(-1) * every).sum(0).isnan().all()


def test_padding_rows_activate_no_expert(native: Native) -> None:
    shape = (128, 8, 64, 32)
    weights, x, shares = mixture(shape, torch.bfloat16), numbers(16, 4, 64), shares_of(shape).view(16, 4, 128)
    assert isinstance(weights.gate_up, Tensor)
    for real in ([0] * 16, [0, 4] * 8, [4] + [0] * 15, [1, 2, 3, 0] * 4):
        count = torch.tensor(real, dtype=torch.int32)
        padding = torch.arange(4) >= count.unsqueeze(1)
        junk, chosen, poisoned = x.clone(), shares.clone(), weights.gate_up.clone()
        junk[padding], chosen[padding] = NAN, NAN
        poisoned.view(128, -1)[~(chosen[~padding] != 0).any(0)] = NAN
        for kernels in (native.mixture, TorchKernels()):
            found = kernels.experts(junk, chosen, replace(weights, gate_up=poisoned), count=count)
            assert found.isfinite().all() and not found[padding].any()


@pytest.mark.parametrize("form", WeightFormat, ids=lambda form: form.value)
def test_quantised_experts_equal_dequantised_ones(native: Native, form: WeightFormat) -> None:
    shape = (8, 2, 96, 64)
    plain, x, shares = mixture(shape, torch.float32), numbers(1, MOST, 96), shares_of(shape)
    weights = quantised(plain, form)
    widened = replace(plain, gate_up=weights.gate_up.dequantize(), down=weights.down.dequantize())  # type: ignore[union-attr]
    found = mixed(native, x, shares, weights)
    torch.testing.assert_close(found, mixed(native, x, shares, widened), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(TorchKernels().experts(x, shares, weights), found, rtol=1e-3, atol=1e-3)
    assert (found - mixed(native, x, shares, plain)).abs().max() > 2e-3, "the format would not be seen"


# ---- which experts a row chooses


@pytest.fixture(scope="module", params=["mixtral", "qwen3 moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = save_pair(tmp_path_factory.mktemp("mixture"), request.param, layers=2)[0]
    return made


def test_router_ties_go_to_the_lowest_experts(folder: Path) -> None:
    one = next(one for one in load(folder).body.modules() if isinstance(one, MixtureOfExperts))
    probs = torch.tensor([[[0.1, 0.3, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25], [0.2, 0.2, 0.1, 0.5]]])
    wanted = torch.tensor([[[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [0.2 / 0.7, 0, 0, 0.5 / 0.7]]])
    torch.testing.assert_close(one.chosen(probs), wanted)


def test_graphs_of_fixed_shape_compute_every_expert(folder: Path) -> None:
    """XLA and Neuron: the same sum, of matrices that are apart."""
    config = ModelConfig.from_pretrained(folder)
    shard = Shard(config)
    made: list[Any] = []
    for kernels in (TraceableKernels(), TorchKernels()):
        weights = load_weights(folder, config, torch.float32)
        model = registry.family(config.model_type).build(shard, weights, kernels, positions=16, group=SingleRank())
        layer = model.layers[0]
        assert isinstance(layer, DecoderLayer)
        made.append(layer.mlp)
    every, chosen = made
    assert isinstance(every.experts, EveryExpert) and isinstance(chosen.experts, ChosenExperts)
    x = torch.randn(2, 5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(every(x), chosen(x), rtol=1e-5, atol=1e-5)
