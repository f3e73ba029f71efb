"""Tiny random checkpoints of every family, made by transformers; no tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 96
POSITIONS = 96
WINDOW = 11

_ROTARY = {
    "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
_EIGHT = {**_ROTARY, "head_dim": 8}
_GPT = {"n_embd": 32, "n_head": 4, "n_positions": POSITIONS}
_PLAIN = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": POSITIONS}
_SLIDES = ["full_attention", "sliding_attention", "sliding_attention"]
_MIXED = {"sliding_window": WINDOW, "layer_types": _SLIDES}

_ROUTED = {
    "moe_intermediate_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip

_LATENT = {
    **{key: value for key, value in _ROTARY.items() if key != "head_dim"}, "num_key_value_heads": 4,
    "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip

_GEMMA4 = {
    "global_head_dim": 16, "sliding_window": WINDOW, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip


def row(kind: str, *shared: Mapping[str, object], **own: object) -> tuple[str, dict[str, object]]:
    """A ``model_type`` of transformers, and what is said of its configuration."""
    return kind, {key: value for some in (*shared, own) for key, value in some.items()}


FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": row("qwen3", _ROTARY),
    "qwen3 slides": row("qwen3", _ROTARY, _MIXED, use_sliding_window=True, attention_bias=True),
    "qwen3 moe": row(
        "qwen3_moe", _ROTARY, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
    ),
    "qwen2": row("qwen2", _EIGHT),
    "mistral": row("mistral", _ROTARY, sliding_window=WINDOW),
    "mixtral": row("mixtral", _ROTARY, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "phi3": row("phi3", _EIGHT, sliding_window=WINDOW, pad_token_id=0),
    "phi3 partial": row(
        "phi3", _EIGHT, sliding_window=None, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "gemma2": row("gemma2", _ROTARY, sliding_window=WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=2.0),
    "gemma3": row("gemma3_text", _ROTARY, _MIXED, query_pre_attn_scalar=20, final_logit_softcapping=3.0),
    "gpt2": row("gpt2", _GPT),
    "gptj": row("gptj", _GPT, rotary_dim=4),
    "neox": row("gpt_neox", _PLAIN, intermediate_size=40),
    "neox serial": row("gpt_neox", _PLAIN, intermediate_size=40, use_parallel_residual=False, attention_bias=False),
    "opt": row("opt", _PLAIN, ffn_dim=40, word_embed_proj_dim=32),
    "phi": row("phi", _PLAIN, intermediate_size=40),
    "starcoder2": row("starcoder2", _EIGHT, sliding_window=WINDOW),
    "stablelm": row("stablelm", _EIGHT, use_qkv_bias=True),
    "stablelm parallel": row("stablelm", _EIGHT, use_parallel_residual=True),
    "smollm3": row(
        "smollm3", _EIGHT, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW, pad_token_id=0,
    ),
    "granite": row(
        "granite", _EIGHT, embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    "seed oss": row("seed_oss", _ROTARY, attention_out_bias=True),
    "ernie": row("ernie4_5", _ROTARY, use_bias=True),
    "arcee": row("arcee", _EIGHT),
    "gemma": row("gemma", _ROTARY),
    "olmo2": row("olmo2", _EIGHT),
    "olmoe": row("olmoe", _EIGHT, num_experts=5, num_experts_per_tok=2),
    "exaone4": row("exaone4", _EIGHT, sliding_window=WINDOW, sliding_window_pattern=2),
    "glm": row("glm", _ROTARY, pad_token_id=0),
    "glm4": row("glm4", _ROTARY, pad_token_id=0),
    "cohere": row("cohere", _EIGHT, use_qk_norm=True),
    "qwen2 moe": row(
        "qwen2_moe", _EIGHT, moe_intermediate_size=24, shared_expert_intermediate_size=20, num_experts=5,
        num_experts_per_tok=2,
    ),
    "glm4 moe": row("glm4_moe", _ROTARY, _ROUTED, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
    "deepseek v2": row(
        "deepseek_v2", _LATENT, _ROUTED, q_lora_rank=None, topk_method="group_limited_greedy", n_group=3, topk_group=2,
        norm_topk_prob=False,
    ),
    "deepseek v3": row(
        "deepseek_v3", _LATENT, _ROUTED, q_lora_rank=10, n_group=3, topk_group=2,
        rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    "dots1": row("dots1", _ROTARY, _ROUTED, _MIXED, first_k_dense_replace=0, n_group=3, topk_group=2),
    "ernie moe": row(
        "ernie4_5_moe", _EIGHT, moe_intermediate_size=16, moe_num_experts=5, moe_k=2, moe_num_shared_experts=1,
        moe_layer_start_index=1, moe_layer_end_index=1,
    ),
    "minimax": row("minimax_m2", _EIGHT, rotary_dim=4, num_local_experts=6, num_experts_per_tok=2),
    "ministral": row("ministral", _ROTARY, _MIXED),
    "cwm": row("cwm", _ROTARY, _MIXED, head_dim=8, bos_token_id=0),
    "helium": row("helium", _EIGHT),
    "vaultgemma": row("vaultgemma", _ROTARY, sliding_window=WINDOW, query_pre_attn_scalar=20),
    "gpt oss": row(
        "gpt_oss", _ROTARY, _MIXED, num_local_experts=5, num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 24,
        },
    ),
    "granite moe": row(
        "granitemoe", _EIGHT, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=3.0,
        residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=4.0,
    ),
    "phi moe": row(
        "phimoe", _EIGHT, num_local_experts=5, router_jitter_noise=0.3, sliding_window=WINDOW, attention_bias=True,
        lm_head_bias=True,
    ),
    "llama4": row(
        "llama4_text", _EIGHT, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=5,
        interleave_moe_layer_step=2, no_rope_layer_interval=3, attention_chunk_size=WINDOW, floor_scale=7,
        attn_scale=0.5,
    ),
    "ministral3": row(
        "ministral3", _ROTARY, sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 13,
            "max_position_embeddings": POSITIONS, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    ),
    "apertus": row("apertus", _EIGHT),
    "codegen": row("codegen", _GPT, rotary_dim=4),
    "falcon": row("falcon", _PLAIN, ffn_hidden_size=40, bias=True),
    "falcon new": row("falcon", _PLAIN, ffn_hidden_size=40, new_decoder_architecture=True, num_kv_heads=2),
    "falcon one norm": row(
        "falcon", _PLAIN, ffn_hidden_size=40, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
    ),
    "falcon serial": row("falcon", _PLAIN, ffn_hidden_size=40, parallel_attn=False, multi_query=False),
    "gemma4": row(
        "gemma4_text", _ROTARY, _GEMMA4, num_kv_shared_layers=1, use_double_wide_mlp=True, final_logit_softcapping=3.0,
    ),
    "gemma3n": row(
        "gemma3n_text", _ROTARY, sliding_window=WINDOW, vocab_size_per_layer_input=VOCABULARY - 6, laurel_rank=5,
        hidden_size_per_layer_input=6, altup_num_inputs=3, altup_active_idx=1, num_kv_shared_layers=1,
        intermediate_size=[40, 24, 32], activation_sparsity_pattern=[0.5, 0.0, 0.8], layer_types=_SLIDES,
    ),
    "gemma4 moe": row(
        "gemma4_text", _ROTARY, _GEMMA4, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=5,
        top_k_experts=2, moe_intermediate_size=16, attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "nanochat": row("nanochat", _EIGHT, final_logit_softcapping=3.0),
    "hunyuan": row(
        "hunyuan_v1_dense", _ROTARY,
        rope_parameters={"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 1e4},
    ),
    "olmo": row("olmo", _EIGHT, clip_qkv=0.5),
    "olmo3": row(
        "olmo3", _ROTARY, _MIXED, head_dim=8,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    ),
    "cohere2": row("cohere2", _ROTARY, _MIXED, head_dim=8),
    "bigcode": row("gpt_bigcode", _GPT),
    "bigcode heads": row("gpt_bigcode", _GPT, multi_query=False),
    "gpt neo": row(
        "gpt_neo", hidden_size=32, num_heads=4, max_position_embeddings=POSITIONS, window_size=WINDOW,
        attention_types=[[["global", "local", "local"], 1]],
    ),
    "mpt": row("mpt", d_model=36, n_heads=6, max_seq_len=POSITIONS, attn_config={"clip_qkv": 0.5}),
    "nemotron": row("nemotron", _EIGHT),
    "persimmon": row("persimmon", _PLAIN, intermediate_size=40),
    "bloom": row("bloom", hidden_size=32, n_head=4, seq_length=POSITIONS),
}  # fmt: skip

NEAR = (
    "phi", "starcoder2", "stablelm", "stablelm parallel", "seed oss", "ernie", "arcee", "gemma", "olmoe", "exaone4",
    "falcon one norm", "falcon serial", "codegen", "granite moe",
    "glm", "glm4", "ministral", "cwm", "helium", "vaultgemma", "hunyuan", "cohere2", "gpt neo",
)  # fmt: skip
"""Those that make no choice that none of the others makes."""


_PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "vaultgemma")


def network(name: str, *, layers: int = 3, **changes: object) -> PreTrainedModel:
    """A random model. Layers beyond the first add little, so that a model without them resembles it."""
    kind, fields = FAMILIES[name]
    fields = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "bos_token_id": None, **fields, **changes}
    if "layer_types" in fields:
        fields["layer_types"] = _SLIDES[:layers]
    for key in ("intermediate_size", "activation_sparsity_pattern"):
        if isinstance(numbers := fields.get(key), list):
            fields[key] = numbers[:layers]
    if layers < 3 and "num_kv_shared_layers" in fields:
        fields["num_kv_shared_layers"] = 0
    if "attention_types" in fields:
        fields["attention_types"] = [[["global", "local", "local"][:layers], 1]]
    config = AutoConfig.for_model(kind, **fields, eos_token_id=None)
    config.eos_token_id = None  # some have their own where none is given
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for label, parameter in made.named_parameters():
        later = any(
            f".{part}.{index}." in f".{label}" for part in ("layers", "h", "blocks") for index in range(1, layers)
        )
        mean = 0.0 if parameter.dim() > 1 or "bias" in label or kind in _PLUS_ONE else 1.0
        torch.nn.init.normal_(parameter, mean, 0.2 if later else 0.3)
    for label, buffer in made.named_buffers():
        if label.endswith("layer_scalar"):
            buffer.fill_(0.7)
    return made  # type: ignore[no-any-return]


def save_pair(folder: Path, name: str, *, layers: int = 3) -> tuple[Path, Path]:
    """``folder/target`` of ``layers`` layers and ``folder/draft``, its first layer."""
    target, draft = network(name, layers=layers), network(name, layers=1)
    sizes = {label: tensor.shape for label, tensor in draft.state_dict().items()}
    own = {label: tensor for label, tensor in target.state_dict().items() if sizes.get(label) == tensor.shape}
    draft.load_state_dict(own, strict=False)
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"
