"""The family of docs/extending/model.md against a reference without a cache, whole and on two ranks; and its length."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.decoder import steps
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.plain import apply_rope
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.registry import MODEL_FAMILIES, family
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.options import LoadOptions, decoder_options
from paceline.decoder.parallel.sharding import GQA, Shard, layout
from paceline.decoder.weights.checkpoint import load_weights
from paceline.placement.planning.footprint import footprint
from tests.docs.extending import lines, written
from tests.docs.pages import text

PAGE = "docs/extending/model.md"
CONFIG = {
    "model_type": "parallel", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None,
}  # fmt: skip
TEXT = [5, 9, 17, 3, 44, 90, 2, 61, 5, 9]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A random checkpoint of the family, whose row is in the table."""
    exec(written(PAGE, "parallel", tmp_path, monkeypatch), {})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    config = ModelConfig.from_pretrained(tmp_path)
    specs = family("parallel").tensors(config)
    drawn = {name: torch.randn(spec.shape) * 0.3 + ("norm" in name) for name, spec in specs.items()}
    save_file(drawn, tmp_path / "model.safetensors")
    yield tmp_path
    MODEL_FAMILIES.pop("parallel")
    sys.modules.pop("parallel", None)


def reference(folder: Path, text: list[int]) -> Tensor:
    """Logits [T, V] of a text in plain PyTorch: no cache, no kernels, no ranks."""
    config = ModelConfig.from_pretrained(folder)
    w, eps, width = load_weights(folder, config, torch.float32), config.rms_norm_eps, config.head_dim
    cos, sin = (x[: len(text)].unsqueeze(1) for x in rope_tables(config.rope, width, 64))
    hidden = w["embed.weight"][text]
    for index in range(config.num_layers):
        own = {name.split(".")[2]: x for name, x in w.items() if name.startswith(f"layers.{index}.")}
        x = F.rms_norm(hidden, x_shape := hidden.shape[-1:], own["norm"], eps)
        q, k, v = (F.linear(x, own[f"{side}_proj"]).unflatten(-1, (-1, width)) for side in "qkv")
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        share = config.num_heads // config.num_kv_heads
        k, v = (y.repeat_interleave(share, 1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(*(y.transpose(0, 1) for y in (q, k, v)), is_causal=True)
        attention = F.linear(mixed.transpose(0, 1).flatten(1), own["o_proj"])
        gated = F.silu(F.linear(x, own["gate_proj"])) * F.linear(x, own["up_proj"])
        hidden = hidden + attention + F.linear(gated, own["down_proj"])
    return F.linear(F.rms_norm(hidden, x_shape, w["norm.weight"], eps), w["head.weight"])


class Threads:
    """Two ranks in one process. A `paceline.decoder.parallel.collectives.Collectives` for each."""

    degree = 2

    def __init__(self, rank: int, shared: list[Tensor], barrier: Barrier) -> None:
        self._rank, self._shared, self._barrier = rank, shared, barrier

    def gather(self, x: Tensor) -> Tensor:
        self._shared[self._rank] = x
        self._barrier.wait()
        every = torch.stack(self._shared)
        self._barrier.wait()
        return every

    def reduce(self, x: Tensor) -> Tensor:
        every = self.gather(x)
        return every[0] + every[1]


@pytest.mark.parametrize(("page", "most"), [("acceptance", 60), ("backend", 60), ("model", 120)])
def test_an_example_has_the_stated_number_of_lines(page: str, most: int) -> None:
    stated, counted = lines(f"docs/extending/{page}.md")
    assert counted == stated < most


def test_the_newest_family_has_the_stated_numbers_of_lines() -> None:
    pattern = r"Gemma 3n is (\d+) lines in\s+`families_gemma.py` and (\d+) of network in `gemma4.py`"
    stated = re.search(pattern, text(PAGE))
    assert stated is not None
    for number, name in zip(stated.groups(), ("families_gemma", "gemma4"), strict=True):
        _, section = (Path("decoder/models") / f"{name}.py").read_text().split("# ---- Gemma 3n\n")
        assert int(number) == sum(bool(line) for line in section.splitlines())


def test_the_example_family_loads_decodes_and_drafts_for_itself(folder: Path) -> None:
    load = {"n_positions": 64, "backend": "eager", "amp": "f32", "context_length_estimate": 16}
    target, draft = AutoDecoder.from_pretrained(folder, **load), AutoDecoder.from_pretrained(folder, **load)
    steps.prefill(target, 0, TEXT[:6])
    rest = torch.tensor([TEXT[6:]], dtype=torch.int32)
    logits, _ = steps.window(target, rest, torch.tensor([6], dtype=torch.int32), bucket=64)
    torch.testing.assert_close(logits[0], reference(folder, TEXT)[6:], atol=2e-5, rtol=2e-5)
    generator = SpeculativeGenerator(draft, target, k=3)
    sequence = generator.sample([TEXT], max_new_tokens=20)
    assert torch.equal(sequence, target.sample([TEXT], max_new_tokens=20))
    assert generator.statistics.num_accepted_tokens == generator.statistics.num_draft_tokens
    text = sequence[0].tolist()
    assert text[len(TEXT) :] == reference(folder, text)[len(TEXT) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("gqa", [GQA.SHARD_OVER_HEADS, GQA.ALL_GATHER_HEADS])
def test_the_example_family_on_two_ranks_keeps_the_tokens(folder: Path, gqa: GQA) -> None:
    config = ModelConfig.from_pretrained(folder)
    divided = layout(config, 2, gqa)
    options = decoder_options(LoadOptions(context_length_estimate=16, amp="f32"), 64, divided)
    shared, barrier = [torch.empty(0)] * 2, Barrier(2, timeout=60)

    def run(rank: int) -> Tensor:
        weights = load_weights(folder, config, torch.float32, shard=Shard(config, divided, rank))
        body = ModelWithCache(
            config, options, weights, kernels=TorchKernels(), rank=rank, group=Threads(rank, shared, barrier)
        )
        place = CachePosition(*(torch.tensor([n], dtype=torch.int32) for n in (0, len(TEXT), 0)), 64)
        with torch.no_grad():
            hidden, _ = body(torch.tensor([TEXT], dtype=torch.int32), place)
            return body.logits(hidden)[0]

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(run, range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, reference(folder, TEXT), atol=2e-5, rtol=2e-5)


def test_the_planner_computes_the_size_of_the_example_family(folder: Path) -> None:
    config = ModelConfig.from_pretrained(folder)
    numbers = sum(spec.shape[0] * (spec.shape[1:] or (1,))[0] for spec in family("parallel").tensors(config).values())
    shape = LoadOptions(amp="f32", n_positions=64)
    assert footprint(config, shape, 1).weights == 4 * numbers
    assert 0.45 * 4 * numbers < footprint(config, shape, 2).weights < 0.6 * 4 * numbers
