"""fp8_e4m3 up to 240: the same numbers in PyTorch's type and in the one of Neuron's chips, from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import save_quantized
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.base import check_formats
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor, Stored, quantize
from paceline.neuron import graph_lint
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import lower, state_of
from tests.decoder import tiny
from tests.decoder.steps import STEPS, inputs

NEURON = [name for name, row in BACKENDS.items() if not row.e4m3]
FORM = "fp8_e4m3"
WIDE = "model.layers.0.mlp.down_proj.weight"
"""The matrix with numbers above 240: in the last of its columns alone, which are those of the last rank."""


def ieee(bits: int) -> float:
    """A byte as IEEE 754 would have it: sign, four bits of exponent with a bias of 7, three bits of mantissa."""
    sign, exponent, mantissa = -1 if bits >> 7 else 1, bits >> 3 & 15, bits & 7
    if exponent == 15:
        return sign * float("nan" if mantissa else "inf")
    return sign * (mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def numbers(data: Tensor) -> Tensor:
    """Numbers that a chip reads in a matrix of e4m3."""
    return torch.tensor([ieee(bits) for bits in range(256)])[data.view(torch.uint8).long()]


@pytest.fixture(scope="module")
def original(workshop: tiny.Workshop) -> Path:
    return workshop.checkpoint()


@pytest.fixture(scope="module")
def wide(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as other programs write it: rows of one matrix are scaled to 448."""
    made = tmp_path_factory.mktemp("wide") / "model"
    save_quantized(original, made, FORM)
    tensors = load_file(made / "model.safetensors")
    row = tensors[WIDE].float()
    row[:, :-4] = row[:, :-4].clamp(-120, 120)
    row[::2, -4:] = torch.tensor([448.0, -256.0, 0.001953125, 3 * 0.001953125])  # the last are subnormal and odd
    row[1::2, -4:] = 240.0
    tensors[WIDE] = row.to(torch.float8_e4m3fn)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def packed(weights: dict[str, Stored]) -> dict[str, QuantizedTensor]:
    return {name: one for name, one in weights.items() if isinstance(one, QuantizedTensor)}


def read(folder: Path, **options: Any) -> dict[str, QuantizedTensor]:
    return packed(load_weights(folder, ModelConfig.from_pretrained(folder), torch.float32, **options))


def test_e4m3_quantisation_is_the_same_on_every_chip() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    made = quantize(weight, WeightFormat.FP8_E4M3)
    assert torch.equal(numbers(made.data), made.data.float())
    assert torch.equal(made.data.float().abs().amax(1), torch.full((40,), 240.0))
    assert made.scales is not None
    normal = (weight / made.scales[:, None]).abs() >= 2**-6
    assert ((made.dequantize() - weight).abs() <= weight.abs() / 16 * 1.0001)[normal].all()


def test_e4m3_above_240_loads_on_backends_that_support_it(wide: Path) -> None:
    found = read(wide)
    assert [name for name, one in found.items() if one.beyond] == [WIDE]
    assert found[WIDE].data.float().abs().max() == 448
    assert numbers(found[WIDE].data).isinf().any() or numbers(found[WIDE].data).isnan().any()
    for name in BACKENDS.keys() - NEURON:
        check_formats(name, found.values())


@pytest.mark.parametrize("name", NEURON)
@pytest.mark.parametrize("rank", [0, 1])
def test_neuron_rejects_e4m3_above_240_on_every_rank(wide: Path, name: str, rank: int) -> None:
    config = ModelConfig.from_pretrained(wide)
    found = read(wide, shard=Shard(config, Layout(2), rank))
    assert bool((found[WIDE].data.float().abs() > 240).any()) is (rank == 1)
    with pytest.raises(
        ConfigurationError, match=rf"expected weights of at most 240 .*'{name}' .*quantization='{FORM}'"
    ):
        check_formats(name, found.values())


def test_requested_e4m3_quantisation_stays_within_240(wide: Path) -> None:
    """The same weights, but for odd multiples of the smallest number."""
    before, after = read(wide), read(wide, quantization=FORM)
    for name, one in after.items():
        assert not one.beyond and torch.equal(numbers(one.data), one.data.float())
        if name != WIDE:
            assert torch.equal(one.data.view(torch.uint8), before[name].data.view(torch.uint8))
    old, new = before[WIDE], after[WIDE]
    assert old.scales is not None and new.scales is not None
    assert torch.equal(new.scales[::2], 2 * old.scales[::2]) and torch.equal(new.scales[1::2], old.scales[1::2])
    apart = (new.dequantize() - old.dequantize()).abs() / old.scales[:, None]
    assert torch.equal(apart[1::2], torch.zeros_like(apart[1::2]))
    assert 0 < apart.max() <= 2**-9 * 1.001 and (apart[(old.data.float().abs() >= 2**-5)] == 0).all()
    for name in NEURON:
        check_formats(name, after.values())
    config = ModelConfig.from_pretrained(wide)
    parts = [read(wide, quantization=FORM, shard=Shard(config, Layout(2), rank))[WIDE] for rank in (0, 1)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), new.dequantize())


@pytest.mark.parametrize(
    "name", ["window, tree", *(pytest.param(n, marks=pytest.mark.full) for n in ("prefill", "verify, reject, drawn"))]
)
def test_steps_over_e4m3_are_exportable_graphs(original: Path, name: str) -> None:
    """A compiler is given the bytes, and the operators that widen them."""
    decoder = tiny.load(original, batch_size=4, context_length_estimate=[tiny.CHUNK], quantization=FORM)
    weights = load_weights(original, decoder.config, torch.float32, quantization=FORM)
    body = ModelWithCache(decoder.config, decoder.options, weights, kernels=TraceableKernels()).eval()
    step, given = STEPS[name](body, tiny.POSITIONS), inputs(name, 1)
    lowered = lower(name, step, given)
    assert graph_lint.lint(lowered) == []
    state = {each: value.detach().clone() for each, value in state_of(step, lowered).items()}
    assert torch.float8_e4m3fn in {value.dtype for value in state.values()}
    _, outputs = lowered.run(state, given)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(outputs, step(*given), strict=True))
