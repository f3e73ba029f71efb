"""Prompts of every length up to the last position, rows of unequal length, porters' names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import paceline
from paceline import SpeculativeGenerator
from paceline.auto import AutoDecoder, SamplingDecoder
from paceline.core.errors import CheckpointError, ContextError
from paceline.decoder import steps
from paceline.decoder.models.registry import MODEL_FAMILIES
from tests.decoder.families import save_pair
from tests.fakes_models import POSITIONS, V, load, network, saved

BUCKETS = [16, 32, POSITIONS]
TEXT = torch.randint(V, (POSITIONS,), generator=torch.Generator().manual_seed(2)).tolist()
ENDS = sorted({edge + by for edge in (8, 16, 24, 32, 48, POSITIONS) for by in (-1, 0, 1) if edge + by < POSITIONS})


@pytest.fixture(scope="module")
def judge() -> LlamaForCausalLM:
    return network()


@pytest.fixture(scope="module")
def target(judge: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> SamplingDecoder:
    return load(saved(judge, tmp_path_factory.mktemp("target")), slots=4, positions=BUCKETS)


def test_logits_are_right_after_prompts_of_every_length(target: SamplingDecoder, judge: LlamaForCausalLM) -> None:
    with torch.no_grad():
        exact = judge(torch.tensor([TEXT])).logits[0]
    for length in range(1, POSITIONS + 1):
        made, _ = steps.prefill(target, length % 4, TEXT[:length])
        torch.testing.assert_close(made[0, 0], exact[length - 1], atol=2e-4, rtol=1e-4)


def test_texts_starting_at_every_bucket_border_are_right(target: SamplingDecoder, judge: LlamaForCausalLM) -> None:
    """Rows of unequal length, more than slots, each to its last position or over an edge; with a draft and without."""
    prompts = [TEXT[:length] for length in ENDS]
    plain = target.sample(prompts, max_new_tokens=6, return_dict=True)
    drafted = SpeculativeGenerator("ngram", target, k=4).sample(prompts, max_new_tokens=6, return_dict=True)
    assert torch.equal(plain.sequences, drafted.sequences) and plain.lengths == drafted.lengths  # type: ignore[union-attr]
    for prompt, row, length in zip(prompts, plain.sequences, plain.lengths, strict=True):  # type: ignore[union-attr]
        assert length == min(len(prompt) + 6, POSITIONS)
        with torch.no_grad():
            exact = judge(row[None, : length - 1]).logits[0, len(prompt) - 1 :]
        assert row[len(prompt) : length].tolist() == exact.argmax(-1).tolist()
    with pytest.raises(ContextError):
        target.sample([TEXT], max_new_tokens=1)


def test_every_transformers_neuronx_class_has_a_family() -> None:
    names = [name for name in paceline.__all__ if name.endswith("ForSampling")]
    families = [family for name in names for family in getattr(paceline, name).families]
    assert len(set(families)) == len(families) and set(families) <= set(MODEL_FAMILIES)


@pytest.mark.parametrize(("name", "family"), [("Qwen3ForSampling", "qwen3"), ("GPT2ForSampling", "gpt2")])
def test_a_class_loads_only_its_family(tmp_path: Path, name: str, family: str) -> None:
    folder, _ = save_pair(tmp_path / "pair", family)
    options = {"backend": "eager", "amp": "f32", "context_length_estimate": [16]}
    decoder = getattr(paceline, name).from_pretrained(folder, **options)
    plain = AutoDecoder.from_pretrained(folder, **options)  # type: ignore[arg-type]
    assert torch.equal(decoder.sample([[5, 9]], max_new_tokens=5), plain.sample([[5, 9]], max_new_tokens=5))
    says = f"model_type: expected llama for LlamaForSampling, got '{family}'; use AutoDecoder"
    with pytest.raises(CheckpointError, match=says):
        paceline.LlamaForSampling.from_pretrained(folder, **options)
