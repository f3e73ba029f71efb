"""Every family against transformers: logits and greedy text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import paceline
from paceline.auto import SamplingDecoder
from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.kernels.protocol import CachePosition, Tree
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.registry import MODEL_FAMILIES
from tests.decoder import tiny
from tests.decoder.families import FAMILIES, NEAR, POSITIONS, VOCABULARY, WINDOW, save_pair

TEXT = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
every_family = pytest.mark.parametrize("name", FAMILIES)
every_choice = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in NEAR else ()) for name in FAMILIES]
)
"""Texts of families that make no choice of their own are decoded in full runs only; their logits always."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: save_pair(tmp_path_factory.mktemp("family"), name) for name in FAMILIES}


loaded = partial(tiny.load, context_length_estimate=[16])


def read(decoder: SamplingDecoder, tokens: Tensor, row: int, parents: list[int] | None = None) -> Tensor:
    """Logits of a window from one cache row on."""
    lines = len(tokens)
    rows = torch.full((lines,), row, dtype=torch.int32)
    tree = None if parents is None else Tree.of(torch.tensor([parents] * lines, dtype=torch.int32))
    place = CachePosition(
        rows, torch.full_like(rows, tokens.shape[1]), torch.arange(lines, dtype=torch.int32), POSITIONS, tree=tree
    )
    with torch.inference_mode():
        return decoder.body.logits(decoder.body(tokens.int(), place)[0])


def wanted(folder: Path, tokens: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: Tensor = model(tokens).logits
    return logits


def test_every_family_has_a_case() -> None:
    """transformers has no MiMo: `tests.draft.test_mtp` compares it with a Qwen2 of the same weights."""
    assert {kind for kind, _ in FAMILIES.values()} | {"llama", "mimo"} == set(MODEL_FAMILIES)


@every_family
def test_family_logits_equal_those_of_transformers(folders: dict[str, tuple[Path, Path]], name: str) -> None:
    """Prefill, single tokens, a window, a window once more with other tokens before it (a rollback), and a tree."""
    folder = folders[name][0]
    decoder, reference = loaded(folder, batch_size=2), wanted(folder, TEXT)
    found = [read(decoder, TEXT[:, :16], 0)]
    found += [read(decoder, TEXT[:, at : at + 1], at) for at in range(16, 20)]
    read(decoder, (TEXT[:, 20:29] + 1) % VOCABULARY, 20)  # not accepted
    found += [read(decoder, TEXT[:, 20:25], 20), read(decoder, TEXT[:, 25:40], 25)]
    torch.testing.assert_close(torch.cat(found, 1), reference, atol=1e-4, rtol=1e-4)
    # Two ways from the root at 30: 31, 32 of the text at rows 2 and 4, and others at rows 1 and 3.
    other = (TEXT[:, 31:33] + 7) % VOCABULARY
    nodes = torch.stack((TEXT[:, 30], other[:, 0], TEXT[:, 31], other[:, 1], TEXT[:, 32]), 1)
    grown = read(decoder, nodes, 30, [-1, 0, 0, 1, 2])
    torch.testing.assert_close(grown[:, [0, 2, 4]], reference[:, 30:33], atol=1e-4, rtol=1e-4)
    way = torch.cat((TEXT[:, :31], other), 1)
    torch.testing.assert_close(grown[:, [1, 3]], wanted(folder, way)[:, 31:], atol=1e-4, rtol=1e-4)


@every_choice
def test_greedy_texts_equal_transformers(folders: dict[str, tuple[Path, Path]], name: str) -> None:
    """With a draft, and sampled: the equality matrix has families of every kind of attention and experts."""
    folder, prompt = folders[name][0], TEXT[:1, :9]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    greedy = model.generate(prompt, max_length=40, do_sample=False, pad_token_id=0)
    assert torch.equal(loaded(folder, batch_size=2).sample(prompt, 40), greedy)


@pytest.mark.parametrize(
    ("name", "fields", "parts"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "'gpt2'"]),
        ("opt", {"do_layer_norm_before": False}, ["do_layer_norm_before"]),
        ("opt", {"word_embed_proj_dim": 16}, ["word_embed_proj_dim", "32"]),
        ("mpt", {"norm_type": "low_precision_rmsnorm"}, ["norm_type: ", "low_precision_rmsnorm"]),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, ["apply_residual_connection_post_layernorm"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"hidden_activation": "tanh"}, ["hidden_activation: ", "got 'tanh'"]),
        ("qwen3 moe", {"mlp_only_layers": [0]}, ["mlp_only_layers"]),
        ("qwen3 moe", {"capacity_factor": 1.5}, ["capacity_factor: ", "got 1.5"]),
        ("mixtral", {"capacity_factor": 2.0}, ["capacity_factor: ", "got 2.0"]),
        ("deepseek v2", {"topk_method": "noaux_tc"}, ["topk_method: expected greedy or", "got 'noaux_tc'"]),
        ("deepseek v3", {"v_head_dim": 14}, ["v_head_dim: expected at most", "= 12, got 14"]),
        ("minimax", {"rotary_dim": 10}, ["rotated dimensions per head, at most head_dim = 8, got 10"]),
        ("qwen3 slides", {"layer_types": ["chunked_attention"] * 3}, ["chunked_attention"]),
        ("falcon", {"alibi": True}, ["alibi: expected False", "'falcon'"]),
        ("gpt oss", {"swiglu_limit": 5.0}, ["swiglu_limit: expected 7.0", "got 5.0"]),
        ("gpt oss", {"hidden_act": "gelu"}, ["hidden_act: expected 'silu', got 'gelu'"]),
        ("phi moe", {"num_experts_per_tok": 3}, ["num_experts_per_tok: expected 2", "got 3"]),
        ("llama4", {"num_experts_per_tok": 2}, ["num_experts_per_tok: expected 1", "got 2"]),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, ["expected full_attention and chunked_attention"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "got 'all'"]),
        ("gemma4", {"per_layer_config": {"2": {"hidden_size": 8}}}, ["per_layer_config: expected head_dim"]),
        (
            "gemma4",
            {"vocab_size_per_layer_input": 99},
            ["vocab_size_per_layer_input: expected at most", "= 96, got 99"],
        ),
    ],
)
def test_config_values_that_change_the_output_are_rejected(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, name: str, fields: dict[str, object], parts: list[str]
) -> None:
    known = json.loads((folders[name][0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**known, **fields}))
    with pytest.raises(UnknownArchitectureError) as caught:
        loaded(tmp_path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_damaged_layer_pattern_allocates_no_memory(folders: dict[str, tuple[Path, Path]]) -> None:
    known = json.loads((folders["gpt neo"][0] / "config.json").read_text())
    damaged = {**known, "attention_types": [[["global", "local"], 1 << 40]]}
    assert ModelConfig.from_fields(Fields(damaged, "config.json")).blueprint.windows == (0, WINDOW, 0)


def test_every_transformers_neuronx_class_has_a_family() -> None:
    names = [name for name in paceline.__all__ if name.endswith("ForSampling")]
    families = [family for name in names for family in getattr(paceline, name).families]
    assert len(set(families)) == len(families) and set(families) <= set(MODEL_FAMILIES)


@pytest.mark.parametrize(("name", "family"), [("Qwen3ForSampling", "qwen3"), ("GPT2ForSampling", "gpt2")])
def test_a_class_loads_only_its_family(folders: dict[str, tuple[Path, Path]], name: str, family: str) -> None:
    folder, options = folders[family][0], {"backend": "eager", "amp": "f32", "context_length_estimate": [16]}
    decoder = getattr(paceline, name).from_pretrained(folder, **options)
    assert torch.equal(decoder.sample([[5, 9]], max_new_tokens=5), loaded(folder).sample([[5, 9]], max_new_tokens=5))
    says = f"model_type: expected llama for LlamaForSampling, got '{family}'; use AutoDecoder"
    with pytest.raises(CheckpointError, match=says):
        paceline.LlamaForSampling.from_pretrained(folder, **options)
