"""GGUF architectures as rows of data: which family each one is, and what its keys mean in config.json's words.

Most values are of keys that all architectures share, and names of tensors follow from the family's own
(`paceline.decoder.gguf.layout`); a row holds the rest. Keys without effect on the computation are ignored; unknown
keys, and keys that ask for a computation that is not implemented, are rejected with an error that names the key.
Meanings follow llama.cpp's converter and its graphs: https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.gguf.header import GgufHeader
from paceline.decoder.json_fields import Fields
from paceline.decoder.models import registry
from paceline.decoder.models.family import Family

FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of rotary frequencies [rotated / 2]: Llama 3.1's scaling, and longrope's for short and for long texts."""

_READ = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
"""Keys that every architecture may have, below its prefix."""

_WITHOUT_EFFECT = frozenset({"tensor_data_layout", "rope.scaling.finetuned"})
_NEUTRAL: dict[str, object] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_gating_func": 1,
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "nextn_predict_layers": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "pooling_type": 0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
"""Keys whose other values would change the computation, where a row does not read them."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Metadata under the key prefix of an architecture."""

    header: GgufHeader
    prefix: str

    @property
    def fields(self) -> Fields:
        return self.header.fields

    def integer(self, key: str, default: int | None = None) -> int:
        return self.fields.integer(f"{self.prefix}.{key}", default)

    def whole(self, key: str) -> int:
        """Return a non-negative integer; 0 if the key is absent."""
        return self.fields.integer(f"{self.prefix}.{key}", 0, minimum=0)

    def unless_zero(self, key: str, default: float | None) -> float | None:
        """A number, or the default where it is missing or 0, as llama.cpp has it for some."""
        return self.number(key) if self.get(key) else default

    def number(self, key: str, default: float | None = None) -> float:
        return _decimal(self.fields.number(f"{self.prefix}.{key}", default))

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(f"{self.prefix}.{key}", default)

    def get(self, key: str) -> object:
        """The value as it is; None: there is none."""
        return self.header.metadata.get(f"{self.prefix}.{key}")

    def holds(self, tensor: str) -> bool:
        """Whether the file has a tensor of that name."""
        return tensor in self.header.tensors

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", max(1, self.integer("embedding_length") // self.heads))

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def key_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.heads)


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp.

    family      the ``model_type`` that computes the same
    epsilon     the key of the norms' epsilon
    reads       further keys that ``more`` reads
    present     keys of config.json that are true if layer 0 has a tensor: of its name without the layer
    said        keys of config.json with one value in all files
    more        other keys of config.json, made of the metadata
    neutral     further keys with the value that changes nothing
    neighbours  llama.cpp rotates dimensions 2i and 2i + 1 of a head; where the family rotates i and i + half, the
                converter has ordered the rows of queries and keys for it
    stems       parts whose names in a file are others than usual
    mixture     the architecture of files by the same name with experts
    """

    family: str
    epsilon: str = "attention.layer_norm_rms_epsilon"
    reads: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, object] = field(default_factory=dict)
    more: Callable[[Keys], Mapping[str, object]] = lambda _: {}
    neutral: Mapping[str, object] = field(default_factory=dict)
    neighbours: bool = False
    stems: Mapping[str, str] = field(default_factory=dict)
    mixture: Architecture | None = None

    def family_row(self) -> Family:
        return registry.family(self.family)

    @property
    def families(self) -> tuple[str, ...]:
        """The families of its files: without experts, and with them."""
        return (self.family,) if self.mixture is None else (self.family, *self.mixture.families)


# ---- rows

_LAYER_NORM = "attention.layer_norm_epsilon"
_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_BIAS, "mlp_bias": "ffn_up.bias"}
_EXPERTS = ("expert_count", "expert_used_count")
_WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern")


def _mixture(name: str, **said: object) -> Callable[[Keys], Mapping[str, object]]:
    """How many experts there are, by ``name``, and what else holds."""

    def more(keys: Keys) -> Mapping[str, object]:
        return {name: keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count"), **said}

    return more


def _qwen_experts(keys: Keys) -> Mapping[str, object]:
    width = keys.integer("feed_forward_length", 1)
    used = keys.integer("expert_used_count")
    return {"moe_intermediate_size": keys.integer("expert_feed_forward_length", max(1, width // used))}


def _slides(keys: Keys, pattern: int, window: int = 0) -> Mapping[str, object]:
    """The window, 0 for none, and the layers that have it: all but every ``pattern``-th, or as the file says."""
    said, count = keys.get("attention.sliding_window_pattern"), keys.integer("block_count")
    window = window if keys.get("attention.sliding_window") is None else keys.whole("attention.sliding_window")
    if isinstance(said, list):
        slides = [bool(one) for one in said]
    else:
        every = keys.integer("attention.sliding_window_pattern", pattern)
        slides = [layer % every < every - 1 for layer in range(count)]
    kinds = ["sliding_attention" if one and window else "full_attention" for one in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _gemma_scale(keys: Keys, large: int) -> int:
    """Scores are divided by the root of this: the width of a head, but in the one model with ``large`` layers."""
    whole = keys.integer("block_count") == large
    return keys.integer("embedding_length") // keys.heads if whole else keys.head_dim


def _gemma2(keys: Keys) -> Mapping[str, object]:
    return {
        **_slides(keys, 2, 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(keys, 46),
    }


def _gemma3(keys: Keys) -> Mapping[str, object]:
    return {
        **_slides(keys, 6),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.unless_zero("final_logit_softcapping", None),
        "query_pre_attn_scalar": _gemma_scale(keys, 62),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


def _granite(keys: Keys) -> Mapping[str, object]:
    return {
        "attention_multiplier": keys.unless_zero("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.unless_zero("embedding_scale", 1.0),
        "residual_multiplier": keys.unless_zero("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale"),
    }


_LLAMA = Architecture(
    "llama",
    present=_BIASES,
    said={"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    neighbours=True,
    mixture=Architecture("mixtral", reads=_EXPERTS, more=_mixture("num_local_experts"), neighbours=True),
)
_QWEN3_MOE = Architecture(
    "qwen3_moe",
    reads=(*_EXPERTS, "expert_feed_forward_length"),
    present=_BIAS,
    more=lambda keys: {**_mixture("num_experts", norm_topk_prob=True)(keys), **_qwen_experts(keys)},
)
_QWEN2_MOE = Architecture(
    "qwen2_moe",
    reads=(*_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    present={"qkv_bias": "attn_q.bias"},
    more=lambda keys: {
        **_mixture("num_experts", norm_topk_prob=False)(keys),
        **_qwen_experts(keys),
        "shared_expert_intermediate_size": keys.integer(
            "expert_shared_feed_forward_length", keys.integer("feed_forward_length", 1)
        ),
    },
)
_COHERE = Architecture(
    "cohere",
    epsilon=_LAYER_NORM,
    reads=("logit_scale",),
    present={**_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    more=lambda keys: {"logit_scale": keys.unless_zero("logit_scale", 1.0)},
    neighbours=True,
)
_STABLELM = Architecture(
    "stablelm",
    epsilon=_LAYER_NORM,
    reads=("use_parallel_residual",),
    present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    more=lambda keys: {"use_parallel_residual": not keys.holds("blk.0.ffn_norm.weight")},
)
_GPT_NEOX = Architecture(
    "gpt_neox",
    epsilon=_LAYER_NORM,
    reads=("use_parallel_residual",),
    present={"attention_bias": "attn_qkv.bias"},
    more=lambda keys: {"use_parallel_residual": keys.flag("use_parallel_residual", True)},
)

_COHERE2 = Architecture(
    "cohere2",
    epsilon=_LAYER_NORM,
    reads=("logit_scale", *_WINDOW),
    more=lambda keys: {"logit_scale": keys.unless_zero("logit_scale", 1.0), **_slides(keys, 4)},
    neighbours=True,
)
_MPT = Architecture(
    "mpt",
    epsilon=_LAYER_NORM,
    reads=("attention.clamp_kqv", "attention.max_alibi_bias"),
    more=lambda keys: {
        "attn_config": {
            "clip_qkv": keys.unless_zero("attention.clamp_kqv", None),
            "alibi": keys.number("attention.max_alibi_bias", 0.0) != 0.0,
            "alibi_bias_max": keys.number("attention.max_alibi_bias", 8.0),
        }
    },
)


def _routed(keys: Keys) -> Mapping[str, object]:
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", 1),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


_DOTS1 = Architecture(
    "dots1",
    reads=(
        *_EXPERTS, "expert_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
        "expert_weights_scale", "expert_weights_norm",
    ),
    present=_BIAS,
    more=_routed,
    neutral={"expert_gating_func": 2},
)  # fmt: skip
_MINIMAX_M2 = Architecture(
    "minimax_m2",
    reads=(*_EXPERTS, "expert_feed_forward_length"),
    more=lambda keys: {
        **_mixture("num_local_experts")(keys),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
    },
    neutral={"expert_gating_func": 2},
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen2moe": _QWEN2_MOE,
    "qwen3": Architecture("qwen3", present=_BIAS),
    "qwen3moe": _QWEN3_MOE,
    "phi2": Architecture("phi", epsilon=_LAYER_NORM),
    "phi3": Architecture(
        "phi3",
        reads=("attention.sliding_window",),
        more=lambda keys: {"sliding_window": keys.whole("attention.sliding_window") or None},
    ),
    "gemma": Architecture("gemma", present=_BIAS),
    "gemma2": Architecture(
        "gemma2",
        reads=(*_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
        present=_BIAS,
        more=_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        reads=(*_WINDOW, "final_logit_softcapping", "rope.freq_base_swa"),
        present=_BIAS,
        more=_gemma3,
    ),
    "smollm3": Architecture("smollm3", present=_BIASES, neighbours=True),
    "granite": Architecture(
        "granite",
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        present=_BIASES,
        more=_granite,
        neutral={"rope.scaling.finetuned": True},
        neighbours=True,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        present={**_BIASES, "attention_out_bias": "attn_output.bias"},
        stems={"mlp norm": "post_attention_norm"},
    ),
    "ernie4_5": Architecture("ernie4_5", present={"use_bias": "attn_q.bias"}, neighbours=True),
    "arcee": Architecture("arcee", present=_BIASES, neighbours=True),
    "olmo": Architecture(
        "olmo",
        epsilon=_LAYER_NORM,
        reads=("attention.clamp_kqv",),
        present=_BIAS,
        more=lambda keys: {"clip_qkv": keys.unless_zero("attention.clamp_kqv", None)},
        neighbours=True,
    ),
    "olmo2": Architecture("olmo2", present=_BIAS),
    "dots1": _DOTS1,
    "minimax-m2": _MINIMAX_M2,
    "olmoe": Architecture("olmoe", reads=_EXPERTS, present=_BIAS, more=_mixture("num_experts", norm_topk_prob=False)),
    "exaone4": Architecture("exaone4", reads=_WINDOW, more=lambda keys: _slides(keys, 4)),
    "chatglm": Architecture("glm", present=_BIAS, neighbours=True),
    "glm4": Architecture("glm4", present=_BIAS, neighbours=True),
    "command-r": _COHERE,
    "cohere2": _COHERE2,
    "starcoder": Architecture("gpt_bigcode", epsilon=_LAYER_NORM),
    "mpt": _MPT,
    "gpt2": Architecture("gpt2", epsilon=_LAYER_NORM),
    "gptneox": _GPT_NEOX,
    "bloom": Architecture("bloom", epsilon=_LAYER_NORM, neutral={"attention.max_alibi_bias": 8.0}),
    "starcoder2": Architecture("starcoder2", epsilon=_LAYER_NORM, present={"use_bias": "attn_q.bias"}),
    "stablelm": _STABLELM,
}
"""By the value of `general.architecture`."""


def architecture(header: GgufHeader) -> Architecture:
    """The row of a file.

    Raises:
        UnknownArchitectureError: there is none.
    """
    name = header.fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{header.path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {name!r}; use a "
            "file of one of them"
        )
    row = ARCHITECTURES[name]
    return row.mixture if row.mixture is not None and header.metadata.get(f"{name}.expert_count") else row


# ---- the configuration


def config(header: GgufHeader, factors: Mapping[str, tuple[float, ...]]) -> dict[str, object]:
    """Return the keys and values of a config.json. ``factors``: those of `FACTORS` that the file has.

    Raises:
        CheckpointError: a key is missing or has a wrong value.
        UnknownArchitectureError: a key would change the computation in a way that is not implemented.
    """
    row = architecture(header)
    keys, fields = Keys(header, header.fields.text("general.architecture")), header.fields
    _refuse_keys(keys, row)
    hidden, head_dim = keys.integer("embedding_length"), keys.head_dim
    embedding = header.tensors.get("token_embd.weight")
    rows = None if embedding is None else embedding.shape[0]
    return {
        "model_type": row.family,
        "vocab_size": keys.integer("vocab_size", _num_tokens(header) or rows),
        "hidden_size": hidden,
        "intermediate_size": keys.integer(
            "feed_forward_length", 1 if "expert_feed_forward_length" in row.reads else None
        ),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": keys.heads,
        "num_key_value_heads": keys.key_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.number(row.epsilon),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, factors),
        **_turned(keys, row.family_row()),
        "sliding_window": None,
        "tie_word_embeddings": not keys.holds("output.weight"),
        **{name: keys.holds(f"blk.0.{tensor}") for name, tensor in row.present.items()},
        **row.said,
        **row.more(keys),
        "bos_token_id": _optional(fields.ids("tokenizer.ggml.bos_token_id")),
        "eos_token_id": _ends(fields),
        "pad_token_id": _optional(fields.ids("tokenizer.ggml.padding_token_id")),
    }


def _refuse_keys(keys: Keys, row: Architecture) -> None:
    read = _READ | {row.epsilon, *row.reads}
    neutral = {**_NEUTRAL, **row.neutral}
    for key, value in keys.header.metadata.items():
        name = key.removeprefix(f"{keys.prefix}.")
        if name == key or name in read or (name in neutral and value == neutral[name]):
            continue
        if name in _WITHOUT_EFFECT and name not in neutral:
            continue
        raise UnknownArchitectureError(
            f"{keys.header.path}: the key {key} (with the value {str(value)[:40]}) is not supported, and passing over "
            "it could change the model's output; use a model without it."
        )


def _num_tokens(header: GgufHeader) -> int | None:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _turned(keys: Keys, family: Family) -> dict[str, object]:
    """The share of a head that is rotated, where the family can rotate a part of it."""
    width, rotated = keys.head_dim, keys.integer("rope.dimension_count", keys.head_dim)
    if keys.integer("attention.value_length", width) != width or (
        rotated != width and family.plan.turned and "turned" not in family.reads
    ):
        key = "attention.value_length" if rotated == width else "rope.dimension_count"
        raise UnknownArchitectureError(
            f"{keys.header.path}: {keys.prefix}.{key} = {keys.integer(key)} and heads of {width} are not supported "
            "together; use a model whose heads are all of one size and rotated whole."
        )
    if "turned" not in family.reads:
        return {}
    share = rotated / width
    return {"partial_rotary_factor": share if int(width * share) == rotated else math.nextafter(share, 2.0)}


def _rope_scaling(keys: Keys, factors: Mapping[str, tuple[float, ...]]) -> dict[str, object] | None:
    scaled = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    kind = keys.fields.text(f"{keys.prefix}.rope.scaling.type", "linear" if scaled else "none")
    positions = keys.integer("context_length")
    share = keys.number("rope.scaling.attn_factor", 1.0)
    freqs, short, long = (factors.get(name) for name in FACTORS)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) if scaled else 1.0
    original = keys.integer("rope.scaling.original_context_length", positions)
    longrope = {"rope_type": "longrope", "attention_factor": share, "original_max_position_embeddings": original}
    if freqs is not None and kind == "none" and share == 1.0 and short is None:
        # Frequencies divided one by one, at any sequence length: longrope with a single set of factors.
        return {**longrope, "short_factor": list(freqs), "long_factor": list(freqs),
                "original_max_position_embeddings": positions}  # fmt: skip
    if short is not None and long is not None and freqs is None and kind in ("none", "longrope") and factor == 1.0:
        return {**longrope, "short_factor": list(short), "long_factor": list(long)}
    if freqs is None and short is None and long is None:
        if kind in ("none", "linear") and share == 1.0:
            return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None
        if kind == "yarn":
            own = keys.get("rope.scaling.yarn_attn_factor")
            grown = share * (1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0)
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "attention_factor": keys.number("rope.scaling.yarn_attn_factor") if own else grown,
                "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
            }
    found = "".join(f" with {name}" for name in FACTORS if name in factors)
    raise UnknownArchitectureError(
        f"{keys.header.path}: rope scaling of type {kind!r}{found} (factor {factor}, attn_factor {share}) is not "
        "supported; supported are none, linear, yarn, the factors of Llama 3.1, and longrope."
    )


def _optional(ids: tuple[int, ...] | None) -> int | None:
    return ids[0] if ids else None


_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>",
        "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
        "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    }
)  # fmt: skip
_FILLS = {
    "fim_pad": frozenset(["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"]),
    "fim_rep": frozenset(["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"]),
    "fim_sep": frozenset(["<|file_sep|>"]),
}
"""Tokens that end a piece of code that is filled in: by their key, or else by their text."""


def _ends(fields: Fields) -> int | list[int] | None:
    """Return the tokens that stop a sequence: those that the file names, and those that llama.cpp knows by their text.

    Of these, "<|end|>" only ends a message where "<|return|>" or "<|flush|>" and a call end a turn, and "</s>" is a
    word where "<|tool_response>" is a token.
    """
    groups = [fields.ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [token for group in groups if group for token in group]
    tokens = fields.values.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, list) else []
    known = _ENDS.union(*_FILLS.values())
    found = {text: number for number, text in enumerate(texts) if isinstance(text, str) and text in known}
    for name, names in _FILLS.items():
        said = fields.ids(f"tokenizer.ggml.{name}_token_id")
        ids += said if said is not None else [found[text] for text in found if text in names]
    ids += [number for text, number in found.items() if text in _ENDS]
    ends_turn = {"<|return|>", "<|flush|>"} & found.keys() and {"<|call|>", "<|calls|>"} & found.keys()
    wrong = {found.get("<|end|>")} if ends_turn else set()
    if "<|tool_response>" in found:
        wrong.add(found.get("</s>"))
    ids = [token for token in dict.fromkeys(ids) if token not in wrong]
    return ids[0] if len(ids) == 1 else ids or None


_LARGEST = 3.4e38  # what a float32 holds


def _decimal(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06, as config.json would have
    it.
    """
    if value > _LARGEST:
        return value
    rounded = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shorter if short <= _LARGEST and struct.pack("<f", short) == rounded), value)
