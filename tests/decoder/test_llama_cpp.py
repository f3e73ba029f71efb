"""GGUF files of every architecture, written by llama.cpp's converter: greedy tokens are those of llama.cpp, in float32,
after every token of a random text and of the continuation.

llama.cpp is built from the source distribution of llama-cpp-python, which takes ten minutes: `make test-gguf` makes an
environment of its own for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline import AutoDecoder
from paceline.decoder import steps
from tests.decoder.gguf_files import MERGES, TOKENS

HERE = Path(__file__).parent
PYTHON, SOURCES = os.environ.get("LLAMA_CPP_PYTHON", ""), os.environ.get("LLAMA_CPP_SOURCES", "")
VOCABULARY, NEW = 288, 16
TEXT = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()

pytestmark = [
    pytest.mark.gguf,
    pytest.mark.skipif(not (PYTHON and SOURCES), reason="llama.cpp is not here; `make test-gguf` builds it"),
]

_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "num_hidden_layers": 3,
}  # fmt: skip
_WIDE = {**_SIZES, "head_dim": 12}
_PLAIN = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 128, "num_hidden_layers": 3}
_LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 1e4,
}  # fmt: skip
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "moe_intermediate_size": 32, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip
_LATENT = {
    **{name: one for name, one in _SIZES.items() if name != "head_dim"}, **_ROUTED, "num_key_value_heads": 4,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT_YARN = {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
_GEMMA4 = {
    **_WIDE, "num_hidden_layers": 6, "global_head_dim": 16, "sliding_window": 11, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}  # fmt: skip
_SIGMOID = {"scoring_func": "sigmoid"}
_LIFTED = ("gemma", "gemma2", "gemma3_text")  # their norms' weights are added to 1
_LENGTH = {"seq_length": 128}  # what the converter takes for the number of positions
_EXAONE = {**_SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3}


@dataclass(frozen=True)
class Case:
    """A model: its ``model_type``, configuration, what the converter also wants in config.json, options, and seed."""

    kind: str
    fields: dict[str, Any]
    besides: dict[str, Any]
    options: tuple[str, ...]
    seed: int


def case(
    kind: str,
    *shared: dict[str, Any],
    besides: dict[str, Any] | None = None,
    options: tuple[str, ...] = (),
    seed: int = 0,
    **own: Any,
) -> Case:
    fields = {key: value for some in (*shared, own) for key, value in some.items()}
    return Case(kind, fields, besides or {}, options, seed)


# PhiMoE is not among them: llama.cpp weighs its two experts by their shares of one softmax, and not as the model does.
CASES: dict[str, Case] = {
    "llama": case("llama", _SIZES),
    "llama tied": case("llama", _SIZES, tie_word_embeddings=True),
    "llama biases": case("llama", _SIZES, attention_bias=True, mlp_bias=True),
    "llama 3": case("llama", _SIZES, rope_parameters=_LLAMA_3),
    "llama linear": case("llama", _SIZES, rope_parameters=_LINEAR),
    "llama yarn": case("llama", _SIZES, rope_parameters=_YARN),
    "llama in parts": case("llama", _SIZES, options=("--outtype", "f32", "--split-max-tensors", "9")),
    "mistral": case("mistral", _SIZES, sliding_window=None),
    "mixtral": case("mixtral", _SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2": case("qwen2", _SIZES),
    "qwen2 fused": case("qwen2", _SIZES, options=("--outtype", "f32", "--fuse-qkv")),
    "qwen2moe": case("qwen2_moe", _SIZES, _EXPERTS, shared_expert_intermediate_size=32),
    "qwen3": case("qwen3", _WIDE),
    "qwen3moe": case("qwen3_moe", _WIDE, _EXPERTS, norm_topk_prob=True),
    "phi2": case("phi", _PLAIN, intermediate_size=128, partial_rotary_factor=0.5),
    "phi3": case("phi3", _SIZES, sliding_window=None, pad_token_id=0),
    "phi3 longrope": case(
        "phi3", _SIZES, sliding_window=None, pad_token_id=0, original_max_position_embeddings=512,
        max_position_embeddings=2048, rope_parameters=_LONGROPE,
    ),
    "gemma": case("gemma", _WIDE),
    "gemma2": case("gemma2", _WIDE, sliding_window=11, query_pre_attn_scalar=12),
    "gemma3": case("gemma3_text", _WIDE, sliding_window=11, query_pre_attn_scalar=12, num_hidden_layers=6),
    "smollm3": case("smollm3", _SIZES, num_hidden_layers=4, pad_token_id=0),
    "granite": case("granite", _SIZES, _MULTIPLIERS),
    "seed_oss": case("seed_oss", _WIDE, attention_bias=True),
    "ernie4_5": case("ernie4_5", _WIDE),
    "arcee": case("arcee", _SIZES),
    "olmo2": case("olmo2", _SIZES),
    "olmo3": case("olmo3", _SIZES, sliding_window=11, num_hidden_layers=4),
    "gpt-oss": case(
        "gpt_oss", _SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=11,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "glm4moe": case("glm4_moe", _WIDE, _ROUTED, use_qk_norm=True),
    "granitemoe": case("granitemoe", _SIZES, _MULTIPLIERS, num_local_experts=5, num_experts_per_tok=2),
    "ernie4_5-moe": case(
        "ernie4_5_moe", _SIZES, moe_intermediate_size=32, moe_num_experts=5, moe_k=2, moe_num_shared_experts=1,
        moe_layer_start_index=1, moe_layer_end_index=2,
    ),
    "nemotron": case("nemotron", _SIZES),
    "hunyuan-dense": case("hunyuan_v1_dense", _SIZES),
    "olmoe": case("olmoe", _SIZES, num_key_value_heads=4, num_experts=5, num_experts_per_tok=2),
    "exaone4": case("exaone4", _EXAONE),
    "exaone4 llama 3": case("exaone4", _EXAONE, rope_parameters=_LLAMA_3),
    "chatglm": case("glm", _SIZES, pad_token_id=0, rms_norm_eps=1e-5, besides=_LENGTH),
    "glm4": case("glm4", _WIDE, pad_token_id=0),
    "command-r": case("cohere", _SIZES),
    "cohere2": case("cohere2", _SIZES, num_hidden_layers=4, sliding_window=11, besides={"rotary_pct": 1.0}),
    "starcoder": case("gpt_bigcode", n_embd=32, n_head=4, n_positions=128, n_layer=3),
    "mpt": case(
        "mpt", d_model=48, n_heads=6, n_layers=3, max_seq_len=128, attn_config={"clip_qkv": 0.5},
        besides={
            "attn_config": {"clip_qkv": 0.5, "alibi": True, "alibi_bias_max": 8}, "architectures": ["MPTForCausalLM"],
        },
    ),
    "olmo": case("olmo", _SIZES, clip_qkv=0.5),
    "dots1": case(
        "dots1", _SIZES, _ROUTED, num_key_value_heads=4, sliding_window=None, norm_topk_prob=True, besides=_SIGMOID,
    ),
    "minimax-m2": case(
        "minimax_m2", _SIZES, num_local_experts=5, num_experts_per_tok=2, besides={**_SIGMOID, "rotary_dim": 4},
    ),
    "gpt2": case("gpt2", n_embd=32, n_head=4, n_positions=128, n_layer=3, besides={"n_ctx": 128}),
    "gptneox": case("gpt_neox", _PLAIN, intermediate_size=64, besides={"rotary_pct": 0.25}),
    "gptneox serial": case(
        "gpt_neox", _PLAIN, intermediate_size=64, use_parallel_residual=False, besides={"rotary_pct": 0.25},
    ),
    "bloom": case("bloom", hidden_size=32, n_head=4, n_layer=3, besides=_LENGTH),
    "starcoder2": case("starcoder2", _SIZES, sliding_window=None),
    "stablelm": case("stablelm", _SIZES, use_qkv_bias=True, partial_rotary_factor=0.5),
    "deepseek2": case("deepseek_v2", _LATENT, q_lora_rank=24),
    "deepseek2 lite": case("deepseek_v2", _LATENT, q_lora_rank=None, num_hidden_layers=27),
    "deepseek2 yarn": case("deepseek_v2", _LATENT, q_lora_rank=24, rope_parameters=_LATENT_YARN),
    "deepseek3": case(
        "deepseek_v3", _LATENT, q_lora_rank=24, n_routed_experts=8, n_group=4, topk_group=2, norm_topk_prob=True,
        rope_parameters={**_LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, besides=_SIGMOID,
    ),
    "llama4": case(
        "llama4_text", _SIZES, intermediate_size_mlp=64, intermediate_size=32, num_local_experts=5,
        num_experts_per_tok=1, interleave_moe_layer_step=2, num_hidden_layers=4, pad_token_id=None,
    ),
    "mistral3": case(
        "ministral3", _SIZES, sliding_window=None, pad_token_id=None,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    ),
    "apertus": case("apertus", _SIZES, rope_parameters=_LLAMA_3, pad_token_id=None),
    "falcon": case("falcon", _PLAIN, ffn_hidden_size=128, besides={"num_kv_heads": 1}),
    "falcon groups": case("falcon", _PLAIN, ffn_hidden_size=128, num_kv_heads=2, new_decoder_architecture=True),
    "gemma3n": case(
        "gemma3n_text", _WIDE, num_hidden_layers=25, num_kv_shared_layers=5, intermediate_size=[4096] * 25,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=VOCABULARY, laurel_rank=64, altup_num_inputs=4,
        sliding_window=11, activation_sparsity_pattern=[0.95] * 10 + [0.0] * 15,
        seed=1,  # and a wide MLP, without near-ties: llama.cpp divides a variance by n - 1
    ),
    "gemma4": case("gemma4_text", _GEMMA4),
    "gemma4 shared": case(
        "gemma4_text", _GEMMA4, num_kv_shared_layers=6, use_double_wide_mlp=True, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY, num_hidden_layers=12,
    ),
    "gemma4 experts": case(
        "gemma4_text", _GEMMA4, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=32,
        attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "stablelm parallel": case("stablelm", _SIZES, use_parallel_residual=True),
}  # fmt: skip


def write_tokenizer(folder: Path, *, full: bool) -> None:
    """Bytes and a few merges; ``full``: a token for every row of the model's table."""
    tokens = [*TOKENS[:-1], *(f"more{number}" for number in range(len(TOKENS) - 1, VOCABULARY) if full)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in MERGES]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|start|>", "<|end|>"])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|start|>", eos_token="<|end|>").save_pretrained(folder)


def write_model(folder: Path, case: Case) -> None:
    """A random checkpoint whose greedy tokens vary."""
    config = AutoConfig.for_model(case.kind, vocab_size=VOCABULARY, **case.fields)
    config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(case.seed)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for label, parameter in made.named_parameters():
        lifted = parameter.dim() == 1 and "bias" not in label and case.kind not in _LIFTED
        torch.nn.init.normal_(parameter, 1.0 if lifted else 0.0, 0.25)
    made.save_pretrained(folder)
    if case.kind == "gemma3n_text":  # published checkpoints have keys and values that no layer reads
        file, size = folder / "model.safetensors", case.fields["head_dim"] * case.fields["num_key_value_heads"]
        tensors = load_file(file)
        for layer in range(20, 25):
            prefix = f"model.layers.{layer}.self_attn."
            tensors |= {f"{prefix}{side}_proj.weight": torch.zeros(size, 32) for side in "kv"}
            tensors[f"{prefix}k_norm.weight"] = torch.ones(case.fields["head_dim"])
        save_file(tensors, file, metadata={"format": "pt"})
    full = case.kind in ("gemma3_text", "gemma3n_text", "gemma4_text")  # whose converters drop the other rows
    write_tokenizer(folder, full=full)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **case.besides}))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model as llama.cpp's converter writes it."""
    place = tmp_path_factory.mktemp("models")
    lines, made = [], {}
    for number, (name, case) in enumerate(CASES.items()):
        write_model(place / str(number), case)
        file = place / f"{number}.gguf"
        lines.append("\t".join((str(place / str(number)), str(file), *case.options)))
        made[name] = file
    command = [sys.executable, str(HERE / "llama_cpp_convert.py"), SOURCES]
    answer = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    said = dict(zip(CASES, (line for line in answer.stdout.splitlines() if line), strict=True))
    assert not {name: line for name, line in said.items() if line != "ok"}
    for name, file in made.items():
        if not file.is_file():  # in parts
            made[name] = next(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))
    return made


@pytest.fixture(scope="module")
def wanted(files: dict[str, Path]) -> dict[str, list[int]]:
    command = [PYTHON, str(HERE / "llama_cpp_greedy.py"), str(NEW), *map(str, files.values())]
    text = " ".join(map(str, TEXT))
    answer = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    assert len(lines) == len(files) and "error" not in lines, answer.stderr[-2000:]
    return {name: [int(one) for one in line.split()] for name, line in zip(files, lines, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_those_of_llama_cpp(
    files: dict[str, Path], wanted: dict[str, list[int]], name: str
) -> None:
    decoder = AutoDecoder.from_pretrained(files[name], backend="eager", amp="f32", n_positions=64)
    tokens = torch.tensor([[*TEXT, *wanted[name][len(TEXT) - 1 : -1]]], dtype=torch.int32)
    row = torch.tensor([0], dtype=torch.int32)
    logits = steps.window(decoder, tokens, row, bucket=decoder.bucket_for(tokens.shape[1]))[0]
    assert logits[0].argmax(-1).tolist() == wanted[name]
    assert len(set(wanted[name])) > 8, "tokens that vary"
