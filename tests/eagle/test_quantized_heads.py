"""Formats of a head's own matrices: int8 over targets of integers, as asked elsewhere; tokens stay the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import PackedMatrix, quantize
from paceline.eagle import checkpoint
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.head import EagleHead
from paceline.eagle.tree import Chain
from tests.decoder import tiny
from tests.eagle import heads

OWN = ("fc", "qkv", "out", "mlp_gate_up", "mlp_down", "head")
PROMPT = [[5, 6, 7, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have rows of whole blocks."""
    made = tmp_path_factory.mktemp("blocks")
    tiny.network("blocks").save_pretrained(made)
    return made


def load(folder: Path, **options: object) -> SamplingDecoder:
    return tiny.fresh(folder, backend="eager", **options)  # type: ignore[arg-type]


def matrix_of(head: EagleHead, name: str) -> object:
    return getattr(head.held if name in ("fc", "head") else head.layers[0], name)


def formats(head: EagleHead) -> list[WeightFormat | None]:
    """Formats of its matrices, the output layer last."""
    found = [matrix_of(head, name) for name in OWN]
    return [one.format if isinstance(one, PackedMatrix) else None for one in found]


@pytest.mark.parametrize("form", [None, *WeightFormat])
def test_a_head_is_int8_for_integer_and_block_targets(folder: Path, tmp_path: Path, form: WeightFormat | None) -> None:
    target = load(folder, quantization=None if form is None else form.value)
    own = WeightFormat.INT8 if form is not None and "fp8" not in form.value else None
    three, one = (heads.drafter(tmp_path / str(v), target, v, Chain(2)).head for v in (3, 1))
    assert formats(three) == [own] * 6
    assert formats(one) == [own] * 5 + [form] and one.held.head is target.body.model.head, "shared, not made again"
    key = heads.drafter(tmp_path / "3", target, 3, Chain(2)).cache_key()
    assert key.get("quantization") == (None if own is None else "int8")


def test_a_requested_head_format_is_used(folder: Path, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, heads.random_head(heads.config(load(folder).config, 3)))
    for quantization, asked, wanted in (
        ("int8", "amp", None),
        ("int8", "q4_0", WeightFormat.Q4_0),
        (None, "int8", WeightFormat.INT8),
    ):
        target = load(folder, quantization=quantization)
        made = EagleDrafter.from_pretrained(tmp_path, target, Chain(2), quantization=asked)
        assert formats(made.head) == [wanted] * 6
        drafted = SpeculativeGenerator({"path": str(tmp_path), "quantization": asked}, target, k=2)
        assert torch.equal(drafted.sample(PROMPT, max_new_tokens=12), target.sample(PROMPT, max_new_tokens=12))
    with pytest.raises(ConfigurationError, match="quantization: expected one of int8"):
        EagleDrafter.from_pretrained(tmp_path, target, Chain(2), quantization="int3")


def test_head_matrices_equal_the_quantised_file(folder: Path, tmp_path: Path) -> None:
    target = load(folder, quantization="int8")
    made = heads.random_head(heads.config(target.config, 3))
    checkpoint.save(tmp_path, made)
    head = EagleDrafter.from_pretrained(tmp_path, target, Chain(2)).head
    qkv = torch.cat([made.weights[f"layer.self_attn.{side}_proj.weight"] for side in "qkv"])
    for name, weight in (("fc", made.weights["fc.weight"]), ("qkv", qkv), ("head", made.weights["lm_head.weight"])):
        assert torch.equal(matrix_of(head, name).dequantize(), quantize(weight, WeightFormat.INT8).dequantize())
