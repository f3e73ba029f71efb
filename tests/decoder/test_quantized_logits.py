"""How far the logits of a quantised model are from those of float32, in every format.

The demo's target reads 64 tokens of a program. The error of a row is measured against the spread of the exact row, as a
constant that is added to all changes nothing, and as the divergence (Kullback-Leibler, nats). Bounds are 1.6 to 2.4
times the error that was measured and 2 to 4.5 times the divergence; with an error below a quarter of its bound, the
format is not in force.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import CachePosition, Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.native.ops import Native
from paceline.decoder.options import LoadOptions, decoder_options
from paceline.decoder.weights.checkpoint import load_weights

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "pycode" / "target"
LENGTH = 64
TEXT = "\n".join(
    f"def read_{name}(path: str) -> dict[str, int]:\n    with open(path) as file:\n        return json.load(file)\n"
    for name in ("config", "options", "weights")
)

BOUNDS: dict[tuple[str | None, str | None], tuple[float, float]] = {
    ("int8", None): (0.015, 0.0003),
    ("q8_0", None): (0.010, 0.00015),
    ("q4_0", None): (0.14, 0.03),
    ("q4_1", None): (0.14, 0.03),
    ("fp8_e4m3", None): (0.05, 0.003),
    (None, "int8"): (0.006, 0.0001),
    (None, "fp8_e4m3"): (0.035, 0.002),
}
"""By the formats of weights and cache: the error of logits over their spread, and the mean divergence."""


@cache
def logits(kernels: type[Kernels], weights: str | None, cached: str | None) -> Tensor:
    """Logits of every token of the text, read at once. [LENGTH, V]"""
    config = ModelConfig.from_pretrained(TARGET)
    asked = LoadOptions(context_length_estimate=LENGTH, amp="f32", quantization=weights, kv_cache_dtype=cached)
    options = decoder_options(asked, 128)
    loaded = load_weights(TARGET, config, torch.float32, quantization=weights)
    body = ModelWithCache(config, options, loaded, kernels=kernels()).eval()
    ids = AutoTokenizer.from_pretrained(TARGET)(TEXT).input_ids[:LENGTH]
    assert len(ids) == LENGTH
    one = torch.zeros(1, dtype=torch.int32)
    place = CachePosition(one, torch.full_like(one, LENGTH), one, 128, tree=None)
    with torch.inference_mode():
        return body.logits(body(torch.tensor([ids], dtype=torch.int32), place)[0])[0].clone()


@pytest.mark.parametrize("kernels", [TorchKernels, Native])
@pytest.mark.parametrize(("weights", "cached"), BOUNDS)
def test_logits_are_as_near_as_the_format_allows(
    kernels: type[Kernels], weights: str | None, cached: str | None
) -> None:
    exact, found = logits(TorchKernels, None, None), logits(kernels, weights, cached)
    spread = exact - exact.mean(-1, keepdim=True)
    error = float((found - exact).norm() / spread.norm())
    kept, made = exact.log_softmax(-1), found.log_softmax(-1)
    divergence = float((kept.exp() * (kept - made)).sum(-1).mean())
    most, far = BOUNDS[weights, cached]
    assert most / 4 < error < most, (error, divergence)
    assert 0 < divergence < far, (error, divergence)


def test_the_kernels_agree_on_float32() -> None:
    exact, found = (logits(kernels, None, None) for kernels in (TorchKernels, Native))
    torch.testing.assert_close(found, exact, atol=2e-3, rtol=1e-4)
