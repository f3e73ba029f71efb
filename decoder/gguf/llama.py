"""The GGUF architecture ``llama`` in Hugging Face's words: the keys of config.json, the names of tensors, their rows.

Keys that say nothing about the computation are passed over; those that would change it in a way that is not
implemented are refused by name, and so is every key that is not known here. What the keys mean is what llama.cpp's
converter writes for Llama models and its `llama` graph reads: https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.gguf.header import GgufHeader
from paceline.decoder.json_fields import Fields

ROPE_FREQS = "rope_freqs.weight"
"""[head_dim / 2] float32: what each rotary frequency is divided by. Llama 3.1's scaling is written like this."""

IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight|rope_freqs\.weight")
"""Tensors that are no weights: frequencies that the metadata determine, and factors that `config` has read."""

_READ = frozenset(
    {
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_WITHOUT_EFFECT = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "pooling_type": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
}
"""Keys whose other values would change the computation."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(weight|bias)")

RowOrder = Callable[[NDArray[Any]], NDArray[Any]]
"""From rows of a tensor as Hugging Face has it to their rows in the file, [n] -> [n]."""


@dataclass(frozen=True, slots=True)
class _Keys:
    """The metadata below the architecture's prefix."""

    fields: Fields

    def integer(self, key: str, default: int | None = None) -> int:
        return self.fields.integer(f"llama.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return _decimal(self.fields.number(f"llama.{key}", default))

    def has(self, key: str) -> bool:
        return self.fields.values.get(f"llama.{key}") is not None


def config(header: GgufHeader, rope_freqs: tuple[float, ...] | None) -> dict[str, object]:
    """The keys and values of a config.json. ``rope_freqs``: the tensor of that name, where there is one.

    Raises:
        CheckpointError: a key is missing or has a wrong value.
        UnknownArchitectureError: a key would change the computation in a way that is not implemented.
    """
    _refuse_keys(header)
    keys, fields = _Keys(header.fields), header.fields
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise UnknownArchitectureError(
                f"{header.path}: llama.{key} = {keys.integer(key)} and heads of {head_dim} are not supported together; "
                "use a model whose heads are all of one size and rotated whole."
            )
    positions = keys.integer("context_length")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": keys.integer("vocab_size", _num_tokens(header)),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": positions,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(header, keys, rope_freqs),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "bos_token_id": _optional(fields.ids("tokenizer.ggml.bos_token_id")),
        "eos_token_id": _ends(fields),
        "pad_token_id": _optional(fields.ids("tokenizer.ggml.padding_token_id")),
    }


def hugging_face_name(name: str) -> str:
    """What Hugging Face calls a tensor; one that is not known keeps its name."""
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _OUTER.get(name, name)


def row_order(header: GgufHeader, name: str) -> RowOrder | None:
    """How the rows of the tensor that Hugging Face calls ``name`` are ordered in the file; None: as they are there.

    Rotary embeddings turn dimension i of a head together with i + D / 2 in Hugging Face's order. llama.cpp turns
    neighbours, so its converter writes the rows of queries and keys as (head, i, half) instead of (head, half, i).
    """
    if not _ROTATED.fullmatch(name):
        return None
    keys = _Keys(header.fields)
    heads = keys.integer("attention.head_count")
    dim = keys.integer("attention.key_length", max(1, keys.integer("embedding_length") // heads))

    def order(rows: NDArray[Any]) -> NDArray[Any]:
        head, inner = np.divmod(rows, dim)
        half, index = np.divmod(inner, dim // 2)
        stored: NDArray[Any] = head * dim + 2 * index + half
        return stored

    return order


def _refuse_keys(header: GgufHeader) -> None:
    for key, value in header.metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in _READ or name in _WITHOUT_EFFECT or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        raise UnknownArchitectureError(
            f"{header.path}: the key {key} (with the value {str(value)[:40]}) is not supported, and passing over it "
            "could change the model's output; use a model without it."
        )


def _num_tokens(header: GgufHeader) -> int | None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _rope_scaling(header: GgufHeader, keys: _Keys, rope_freqs: tuple[float, ...] | None) -> dict[str, object] | None:
    kind = header.fields.text("llama.rope.scaling.type", "linear" if keys.has("rope.scale_linear") else "none")
    positions = keys.integer("context_length")
    if rope_freqs is not None:
        if kind != "none":
            raise UnknownArchitectureError(
                f"{header.path}: {ROPE_FREQS} and rope scaling of type {kind!r} are not supported together."
            )
        # Frequencies divided one by one, at any length of the text: longrope with a single set of factors.
        factors = list(rope_freqs)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": positions,
        }
    if kind == "none":
        return None
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    share = keys.number("rope.scaling.attn_factor", 1.0)
    if kind == "linear" and share == 1.0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", positions)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": share * (1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise UnknownArchitectureError(
        f"{header.path}: rope scaling of type {kind!r} (attn_factor {share}) is not supported; supported are none, "
        "linear, yarn, and the factors of Llama 3.1."
    )


def _optional(ids: tuple[int, ...] | None) -> int | None:
    return ids[0] if ids else None


def _ends(fields: Fields) -> int | list[int] | None:
    """The tokens that end a text: of the text itself, of a turn, and of a message to a tool."""
    groups = [fields.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(token for group in groups if group for token in group))
    return ids[0] if len(ids) == 1 else ids or None


def _decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06, as config.json would have it."""
    rounded = np.float32(value)
    return next(
        (short for digits in range(1, 10) if np.float32(short := float(f"{value:.{digits}g}")) == rounded), value
    )
