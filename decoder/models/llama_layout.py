"""Where a Llama checkpoint keeps what: the names and shapes of its tensors, as Hugging Face writes them.

Pure arithmetic on a ModelConfig; reading files is ``decoder/weights.py``.
"""

import re

from paceline.decoder.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"

# Rotary frequencies, which old versions of transformers saved although config.json determines them.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the decoder needs and its shape (linear weights are [out, in]), in the order they are
    used.

    With tied embeddings there is no ``lm_head.weight``: the embedding serves as the output head.
    """
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= _layer_tensors(config, f"model.layers.{layer}")
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[OUTPUT_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def is_harmless(name: str) -> bool:
    """Whether a checkpoint may hold this tensor besides the expected ones, without any effect."""
    return _HARMLESS.fullmatch(name) is not None


def _layer_tensors(config: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.input_layernorm.weight": (hidden,)}
    for name, shape in attention.items():
        shapes[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        if config.attention_bias:
            shapes[f"{prefix}.self_attn.{name}_proj.bias"] = shape[:1]
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    for name, shape in mlp.items():
        shapes[f"{prefix}.mlp.{name}_proj.weight"] = shape
        if config.mlp_bias:
            shapes[f"{prefix}.mlp.{name}_proj.bias"] = shape[:1]
    return shapes
