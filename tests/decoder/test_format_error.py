"""How far a quantised model's logits are from those of float32: as far as the steps of its format say, and no farther.

Rounding to the nearest leaves an error that is uniform within half a step to either side, and independent from number
to number (Widrow and Kollár, Quantization Noise, 2008, chapter 4). Steps follow from a format's definition and from the
largest of a row or block alone. So noise of that kind, put on float32 weights and carried through the model, says what
the error of the logits must be; nothing that quantises is used for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import AutoDecoder
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import GROUP, WeightFormat
from paceline.decoder.weights.quantize import Stored
from tests.decoder import tiny

FORMATS = list(WeightFormat)
DRAWS = 8
NEAR = 1.6
"""Ratio of two errors that one noise makes: of all logits of 12 tokens, which follow from 32 features each."""


def step_of(weight: Tensor, form: WeightFormat) -> Tensor:
    """The distance of neighbouring numbers of a format at every weight [N, K], or what broadcasts to it."""
    blocks = weight.unflatten(1, (-1, GROUP))
    if form is WeightFormat.INT8:
        return weight.abs().amax(1, keepdim=True) / 127
    if form is WeightFormat.INT8_PER_TENSOR:
        return weight.abs().amax() / 127
    if form is WeightFormat.Q8_0:
        return (blocks.abs().amax(2, keepdim=True) / 127).expand_as(blocks).flatten(1)
    if form is WeightFormat.Q4_0:  # from -8 to 7, and -8 is the largest
        return (blocks.abs().amax(2, keepdim=True) / 8).expand_as(blocks).flatten(1)
    if form is WeightFormat.Q4_1:  # 16 numbers from the least to the largest
        return ((blocks.amax(2, keepdim=True) - blocks.amin(2, keepdim=True)) / 15).expand_as(blocks).flatten(1)
    mantissa, least = {WeightFormat.FP8_E4M3: (3, -6), WeightFormat.FP8_E5M2: (2, -14)}[form]
    scale = weight.abs().amax(1, keepdim=True) / form.largest
    exponent = (weight.abs() / scale).log2().floor().clamp(min=least)
    return scale * 2.0 ** (exponent - mantissa)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have rows of whole blocks."""
    made = tmp_path_factory.mktemp("blocks")
    tiny.network("blocks").save_pretrained(made)
    return made


def logits(body: ModelWithCache) -> Tensor:
    tokens = torch.arange(12, dtype=torch.int32).view(1, 12)
    first, count = torch.zeros(1, dtype=torch.int32), torch.full((1,), 12, dtype=torch.int32)
    with torch.inference_mode():
        return body.logits(body(tokens, CachePosition(first, count, first, tiny.POSITIONS))[0])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
def test_the_error_of_logits_is_that_of_the_format_s_steps(folder: Path, form: WeightFormat) -> None:
    asked = {"backend": "eager", "amp": "f32", "n_positions": tiny.POSITIONS}
    plain = AutoDecoder.from_pretrained(folder, **asked)  # type: ignore[arg-type]
    packed = AutoDecoder.from_pretrained(folder, quantization=form.value, **asked)  # type: ignore[arg-type]
    exact = logits(plain.body)
    generator = torch.Generator().manual_seed(0)
    expected = []
    for _ in range(DRAWS):
        weights: dict[str, Stored] = {}
        for name, weight in load_weights(folder, plain.config, torch.float32).items():
            assert isinstance(weight, Tensor)
            noise = torch.rand(weight.shape, generator=generator) - 0.5
            weights[name] = weight + noise * step_of(weight, form) if weight.dim() > 1 else weight
        noisy = ModelWithCache(plain.config, plain.options, weights, kernels=TorchKernels()).eval()
        expected.append((logits(noisy) - exact).square().mean())
    error = float((logits(packed.body) - exact).square().mean().sqrt())
    bound = float(torch.stack(expected).mean().sqrt())
    assert bound / NEAR < error < bound * NEAR, (error, bound)
