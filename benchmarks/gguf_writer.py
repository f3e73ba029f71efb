"""A Llama or Mixtral model of transformers as a GGUF file for llama.cpp, without a vocabulary.

What `formats.py` compares with; nothing is measured here.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, MixtralForCausalLM

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_BOTH = "mlp.experts.gate_up_proj"


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    layer = ""
    if stem.startswith("model.layers."):
        number, _, stem = stem.removeprefix("model.layers.").partition(".")
        layer = f"blk.{number}."
    return f"{layer}{_NAMES[stem]}.weight"


def _permuted(tensor: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of queries or keys in the order that llama.cpp rotates."""
    return tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


def _matrices(name: str, tensor: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """One tensor by its name in the file; of experts, the two that transformers keeps as one."""
    if not name.endswith(_BOTH):
        return {_name(name): tensor}
    gate, up = np.split(tensor, 2, axis=1)
    layer = name.removesuffix(_BOTH)
    sides = {"gate": gate, "up": up}
    return {_name(f"{layer}mlp.{side}_proj").replace(".weight", "_exps.weight"): one for side, one in sides.items()}


def write_gguf(path: Path, model: LlamaForCausalLM | MixtralForCausalLM, kind: Kind) -> None:
    """All matrices in that format; norms, and which experts a row takes, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if isinstance(model, MixtralForCausalLM):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        tensor = parameter.float().numpy()
        if (count := heads.get(name.split(".")[-2])) is not None:
            tensor = _permuted(tensor, count)
        plain = tensor.ndim == 1 or name.endswith("mlp.gate.weight")
        for label, one in _matrices(name, tensor).items():
            if plain:
                writer.add_tensor(label, one)
            else:
                writer.add_tensor(label, gguf.quants.quantize(np.ascontiguousarray(one), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
