"""Configuration of a model, read from a checkpoint: its sizes, its options and its special ids.

Reads ``config.json`` and ``generation_config.json`` as plain JSON, in the layout of transformers 4 (``rope_theta``,
``rope_scaling``) or 5 (``rope_parameters``); of a GGUF file, its metadata translated to the keys of config.json. The
model's family defines its keys; `standard` reads those that most families have. Every key is read, or in a table of
this module, or named in a warning, because published files have arbitrary keys. It runs no code from the folder, does
not import transformers, and reads neither weights (`paceline.decoder.weights.checkpoint`) nor the tokenizer. Keys that
do not affect the computation are ignored; keys that would change it in a way that is not implemented are rejected with
an error that names them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.core.errors import CheckpointError, ConfigurationError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.models import registry
from paceline.decoder.models.blueprint import Blueprint, Experts
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.layouts import layout_of

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of every rope type; a type ignores those of others.

    ``factor`` None means ``max_position_embeddings / original_max_position_embeddings`` (yarn and longrope
    only). ``share`` of the frequencies of "proportional" are not 0.
    """

    type: str = "default"
    theta: float = 10000.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    share: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def longest(self) -> int | None:
        """How many positions a fixed table serves; None: any number."""
        return {
            "dynamic": self.max_position_embeddings,
            "longrope": self.original_max_position_embeddings,
        }.get(self.type)


def check_positions(config: RopeConfig, positions: int) -> None:
    """Raise ConfigurationError if sequences of ``positions`` tokens need frequencies that depend on their length."""
    if config.longest is not None and positions > config.longest:
        raise ConfigurationError(
            f"n_positions: expected at most {config.longest} for rope type {config.type!r}, got {positions}, and a "
            f"compiled decoder has one table of frequencies; load it with n_positions={config.longest} or less"
        )


STANDARD = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act",
        "tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id", "rope_theta", "rope_scaling",
        "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "quantization_config",
        "per_layer_config",
    }
)  # fmt: skip
"""Keys that `paceline.decoder.models.config.standard` reads for every family."""

HARMLESS: dict[str, str] = {
    **dict.fromkeys(
        (
            "_name_or_path", "name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype",
            "unsloth_version", "unsloth_fixed", "transformers.js_config", "is_llama_config", "model_max_length",
            "max_sequence_length", "tokenizer_class", "license", "language", "has_no_defaults_at_init", "dtype",
        ),
        "says where the file is from, or how its weights are stored",
    ),
    **dict.fromkeys(
        (
            "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
            "classifier_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout",
            "embedding_dropout", "residual_dropout", "layerdrop", "resid_dropout", "embed_dropout", "emb_pdrop",
            "init_device",
            "initializer_range", "init_std", "initializer_factor", "gradient_checkpointing",
            "router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise", "output_router_logits",
            "tf_legacy_loss", "altup_coef_clip",
            "embed_requires_grad",
        ),
        "is of training alone",
    ),
    **dict.fromkeys(
        (
            "use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
            "torchscript", "use_bfloat16", "is_decoder", "tie_encoder_decoder", "attn_implementation",
            "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "use_flash_attention",
            "pretraining_tp", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "cache_implementation",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "bias_dropout_fusion",
            "masked_softmax_fusion", "reorder_and_upcast_attn",
            "skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "experts_implementation",
        ),
        "says how transformers runs it; sums may be added up in another order, or in float32, as they are here",
    ),
    **dict.fromkeys(
        (
            "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        "is of other tasks than text generation",
    ),
    **dict.fromkeys(
        (
            "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
            "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
            "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
            "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
            "prefix", "decoder_start_token_id", "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
            "eod_token_id",
        ),
        "is a default of a generation, not of the model",
    ),
    "n_ctx": "says what n_positions says",
    "initial_context_length": "says what original_max_position_embeddings says",
    "experts_per_token": "says what num_experts_per_tok says",
    "num_nextn_predict_layers": "says how many MTP layers draft, which no token depends on",
    "moe_norm_min": "keeps a sum of probabilities from being zero, which it is not",
    "attention_layers": "says what attention_types says",
    "learned_pos_emb": "has no effect with ALiBi, without which its family is rejected",
    **dict.fromkeys(("pard_token", "spd_type"), "is of drafting in one pass, in `paceline.draft.pard`"),
    "max_window_layers": "says which layers slide in families that read it, and nothing in others",
}  # fmt: skip
"""Keys without effect on a model's computation in Paceline, and why."""

NEUTRAL: dict[str, object] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "use_mrope": False,
    "rope_interleaved": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "rotary": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_embeddings": False,
    "capacity_factor": None,
    "logit_scale": 1.0,
}
"""Keys that would change the results of a family that does not read them, with their neutral values."""


def _refuse_others(config: Fields, neutral: Mapping[str, object]) -> None:
    for key, value in neutral.items():
        actual, value = config.values.get(key), value(config) if callable(value) else value
        if actual is not None and actual != value:
            raise UnknownArchitectureError(
                f"{config.where}: {key}: expected {value!r} for model_type {config.text('model_type')!r}, got "
                f"{actual!r}, which is not supported; use another model"
            )


def _unknown_keys(config: Fields, read: frozenset[str]) -> list[str]:
    """Return the keys that neither this module nor ``read`` knows; a null value counts as absent."""
    _refuse_others(config, {key: value for key, value in NEUTRAL.items() if key not in read})
    known = STANDARD | read | HARMLESS.keys() | NEUTRAL.keys()
    return sorted(key for key, value in config.values.items() if value is not None and key not in known)


def _unknown_inside(config: Fields, nested: Mapping[str, frozenset[str]]) -> list[str]:
    every = {key: inner.values for key in nested if (inner := config.child(key)) is not None}
    return sorted(
        f"{key}.{name}"
        for key, values in every.items()
        for name, value in values.items()
        if value is not None and name not in nested[key] | STANDARD | HARMLESS.keys() | NEUTRAL.keys()
    )


log = logging.getLogger("paceline")

# More than any model has.
_MOST = {"num_hidden_layers": 10000, "num_attention_heads": 1 << 16}
_MOST_EXPERTS = 1 << 16

_ROPE_KEYS = frozenset(
    {
        "type",
        "rope_type",
        "rope_theta",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "partial_rotary_factor",
        "finetuned",  # a remark in the first yarn checkpoints, without effect
    }
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's sizes and options; a model may have no eos, pad or bos token at all.

    local_rope   settings of layers with a sliding window, if they are separate
    layer_sizes  for each layer: the width of a head, and the number of K/V heads; (): as all
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    blueprint: Blueprint = field(default_factory=Blueprint)
    local_rope: RopeConfig | None = None
    layer_sizes: tuple[tuple[int, int], ...] = ()

    def of_layer(self, index: int) -> ModelConfig:
        """The same with the sizes of a layer for all."""
        if not self.layer_sizes:
            return self
        width, heads = self.layer_sizes[index]
        return replace(self, head_dim=width, num_kv_heads=heads, layer_sizes=())

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers whose keys and values are cached."""
        gemma, every = self.blueprint.gemma, range(self.num_layers)
        return tuple(every if gemma is None else (index for index in every if gemma.sources[index] == index))

    @property
    def rotated(self) -> int:
        """How many dimensions of a head rotary embeddings turn, from the first on."""
        return int(self.head_dim * self.blueprint.rotated_share + 1e-6)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read the configuration of a checkpoint: a Hugging Face folder, a GGUF file, or a known model's name."""
        folder = checkpoint_path(path)
        if is_gguf(folder):
            from paceline.decoder.gguf.checkpoint import read_config  # loads PyTorch

            return cls.from_fields(Fields(read_config(folder), str(folder)))
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: expected a folder; give the local folder of a Hugging Face checkpoint (with "
                "config.json), a GGUF file, the name of a model that `paceline list` shows, or an id of the Hugging "
                "Face hub (owner/name)"
            )
        config = Fields(read_json_object(folder / "config.json"), str(folder / "config.json"))
        generation_file = folder / "generation_config.json"
        generation = Fields(read_json_object(generation_file) if generation_file.exists() else {}, str(generation_file))
        return _parse(config, generation, warn=True)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """The configuration in a ``config.json``, to plan with; generation settings are not read."""
        return _parse(Fields(read_json_object(Path(path)), str(path)), Fields({}, str(path)))

    @classmethod
    def from_fields(cls, config: Fields) -> ModelConfig:
        """The configuration in an object laid out like ``config.json``, as part of another file."""
        return _parse(config, Fields({}, config.where))

    def to_dict(self) -> dict[str, object]:
        """Return plain values, ready for JSON. Of the blueprint only what differs from Llama, so that a new option does
        not
        change the fingerprints of models without it.
        """
        values, usual = asdict(self), asdict(Blueprint())
        chosen = {name: value for name, value in values.pop("blueprint").items() if value != usual[name]}
        local, sizes = values.pop("local_rope"), values.pop("layer_sizes")
        values |= {"layer_sizes": sizes} if sizes else {}
        for rope in filter(None, (values["rope"], local)):
            if rope["type"] != "proportional":
                del rope["share"]
        return {**values, **({"blueprint": chosen} if chosen else {}), **({"local_rope": local} if local else {})}

    def fingerprint(self) -> str:
        """Hex sha256 over all fields: equal for equal configurations, in every process, on every machine."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def _parse(config: Fields, generation: Fields, *, warn: bool = False) -> ModelConfig:
    """Parse the keys of a file by the names that its family uses; sizes have no default."""
    family = registry.family(config.text("model_type"), config.where)
    unknown = [*_unknown_keys(config, family.keys), *_unknown_inside(config, family.nested)]
    if warn and unknown:
        log.warning(
            "%s: unknown keys are ignored: %s; if they change the computation, the outputs will be wrong",
            config.where,
            ", ".join(unknown),
        )
    config = family.translated(config)
    _refuse_others(config, family.neutral)
    _refuse_options(config)
    for key, most in _MOST.items():  # before anything is made for each
        if (count := config.integer(key)) > most:
            raise CheckpointError(f"{config.where}: {key}: expected at most {most}, got {count}; correct the file")
    plan = family.blueprint(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{config.where}: num_attention_heads: expected a multiple of num_key_value_heads = {num_kv_heads}, got "
            f"{num_heads}; correct the file"
        )
    vocab_size = config.integer("vocab_size")
    eos, pad, bos = _special_ids(config, generation, vocab_size)
    sides = ("full_attention", "sliding_attention") if plan.local_rope else ("", "")
    full, local = (_rope(config, plan, num_heads, side=side) for side in sides)
    made = ModelConfig(
        model_type=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        rope=full,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        hidden_act=config.text("hidden_act", "silu"),
        eos_token_ids=eos,
        pad_token_id=pad,
        bos_token_id=bos,
        blueprint=plan,
        local_rope=local if plan.local_rope else None,
        layer_sizes=family.layer_sizes(config),
    )
    _check_rotated(made, config.where)
    if plan.experts is not None:
        _check_experts(plan.experts, config.where)
    return made


def _check_rotated(config: ModelConfig, where: str) -> None:
    if config.rotated % 2 or config.rotated > config.head_dim:
        raise UnknownArchitectureError(
            f"{where}: expected an even number of rotated dimensions per head, at most head_dim = {config.head_dim}, "
            f"got {config.rotated}; use another model"
        )


def _check_experts(experts: Experts, where: str) -> None:
    if experts.count > _MOST_EXPERTS:
        raise CheckpointError(
            f"{where}: expected at most {_MOST_EXPERTS} experts, got {experts.count}; correct the file"
        )
    size, rest = divmod(experts.count, experts.groups)
    if experts.groups > 1 and (rest or size < experts.of_group or experts.chosen_groups > experts.groups):
        raise CheckpointError(
            f"{where}: expected {experts.count} experts in equal groups of {experts.of_group} or more, some of which "
            f"are chosen, got {experts.groups} groups, of which {experts.chosen_groups} are chosen; correct the file"
        )
    most = size * min(experts.chosen_groups, experts.groups)
    if experts.chosen > most:
        raise CheckpointError(
            f"{where}: expected at most {most} active experts per token, got {experts.chosen}; correct the file"
        )


def _refuse_options(config: Fields) -> None:
    if quantized := config.values.get("quantization_config"):
        layout_of(quantized, str(config.where))


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if config.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{config.where}: hidden_size: expected a multiple of num_attention_heads = {num_heads}, or head_dim, "
            f"got {hidden_size}; correct the file"
        )
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnknownArchitectureError(
            f"{config.where}: head_dim: expected an even number, since rotary embeddings rotate pairs of "
            f"dimensions, got {head_dim}; use another model"
        )
    return head_dim


def _special_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[tuple[int, ...], int | None, int | None]:
    """eos, pad and bos; generation_config.json goes before config.json, as in Hugging Face's generate."""

    def ids(key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        for fields in (generation, config):
            tokens = fields.ids(key)
            if tokens is not None:
                _check_ids(fields.where, key, tokens, vocab_size=vocab_size)
                return tokens
        # An explicit null in config.json means none; only an absent key takes the default.
        return () if key in config.values else tuple(i for i in default if i < vocab_size)

    pad, bos = ids("pad_token_id", ()), ids("bos_token_id", (1,))
    return ids("eos_token_id", (2,)), pad[0] if pad else None, bos[0] if bos else None


def _check_ids(where: str, key: str, ids: tuple[int, ...], *, vocab_size: int) -> None:
    outside = [token for token in ids if token >= vocab_size]
    if outside:
        raise CheckpointError(
            f"{where}: {key}: expected ids below the vocabulary size {vocab_size}, got {outside[0]}; correct it, or "
            "remove the key if the model has no such token"
        )


def _rope_settings(config: Fields, side: str) -> tuple[Fields, float]:
    """Return the rope settings and the base to use if they have none. ``side``: which layers' settings, if they differ.

    transformers 5 writes both sides in ``rope_parameters``; 4 wrote ``rope_theta``, ``rope_scaling`` and
    ``rope_local_base_freq``.
    """
    base = config.number("rope_theta", 10000.0)
    both = config.child("rope_parameters")
    if side and both is not None and {"full_attention", "sliding_attention"} & set(both.values):
        own = both.child(side)
        if own is None or len(both.values) != 2:
            raise CheckpointError(
                f"{both.where}: expected the two keys full_attention and sliding_attention, got others; correct the "
                "file"
            )
        return own, base if side == "full_attention" else config.number("rope_local_base_freq", base)
    if side == "sliding_attention":
        return Fields({}, config.where), config.number("rope_local_base_freq", base)
    # transformers 5 renamed rope_scaling; if a file has both, the old name wins, as in transformers.
    settings = (config.child(key) for key in ("rope_scaling", "rope_parameters"))
    return next((fields for fields in settings if fields is not None and fields.values), Fields({}, config.where)), base


def _rope(config: Fields, plan: Blueprint, num_heads: int, *, side: str) -> RopeConfig:
    rope, base = _rope_settings(config, side)
    kind = rope.text("rope_type", rope.text("type", "default"))
    _refuse_rope(config, rope, kind, whole=plan.rotated_share == 1.0)
    max_positions = config.integer("max_position_embeddings", 2048)
    pairs = int(_head_dim(config, config.integer("hidden_size"), num_heads) * plan.rotated_share + 1e-6) // 2
    # Some checkpoints have this key outside the rope settings; then transformers prefers that value.
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    needs_factor = kind in ("linear", "dynamic", "llama3")
    longrope = kind == "longrope"
    result = RopeConfig(
        type=kind,
        theta=rope.number("rope_theta", base),
        max_position_embeddings=max_positions,
        original_max_position_embeddings=original,
        factor=rope.number("factor") if needs_factor else rope.optional_number("factor"),
        attention_factor=rope.optional_number("attention_factor"),
        low_freq_factor=rope.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        share=rope.number("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0,
        short_factor=rope.numbers("short_factor", length=pairs) if longrope else (),
        long_factor=rope.numbers("long_factor", length=pairs) if longrope else (),
    )
    if result.theta <= 1.0:
        raise CheckpointError(f"{rope.where}: rope_theta: expected more than 1, got {result.theta}; correct the file")
    if kind == "llama3" and result.low_freq_factor >= result.high_freq_factor:
        raise CheckpointError(
            f"{rope.where}: low_freq_factor: expected less than high_freq_factor = {result.high_freq_factor}, got "
            f"{result.low_freq_factor}; correct the file"
        )
    return result


def _refuse_rope(config: Fields, rope: Fields, kind: str, *, whole: bool) -> None:
    if kind not in ROPE_TYPES:
        raise UnknownArchitectureError(
            f"{rope.where}: rope_type: expected one of {', '.join(ROPE_TYPES)}, got {kind!r}; use a supported model"
        )
    unknown = sorted(set(rope.values) - _ROPE_KEYS)
    if unknown:
        raise UnknownArchitectureError(
            f"{rope.where}: {unknown[0]!r} is not a known rope setting, and ignoring it could change the output; "
            "remove it if it has no effect"
        )
    for fields in (rope, config):
        share = fields.number("partial_rotary_factor", 1.0)
        if share != 1.0 and whole and kind != "proportional":
            raise UnknownArchitectureError(
                f"{fields.where}: partial_rotary_factor: expected 1.0, got {share}; use a model that rotates whole "
                "heads"
            )
