"""What a decoder must know about a model: its sizes, its options and its special ids, read from a checkpoint.

Reads ``config.json`` and ``generation_config.json`` as plain JSON, in the layout of transformers 4 (``rope_theta``,
``rope_scaling``) or 5 (``rope_parameters``); of a GGUF file, its metadata in the words of config.json. What its keys
mean is said by the model's family; `standard` reads those that most families have. Runs no code from the folder, does
not import transformers, and looks neither at the weights (`paceline.decoder.weights.checkpoint`) nor at the tokenizer.
Keys that say nothing about the computation are ignored; those that would change it in a way that is not implemented are
refused by name, and those that nobody knows are named in a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.models import registry
from paceline.decoder.models.known_keys import unknown_keys
from paceline.decoder.models.rope_config import ROPE_TYPES, RopeConfig
from paceline.decoder.weights.compressed import check_quantization_config
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.known_models import KNOWN_MODELS
from paceline.decoder.weights.locate import checkpoint_path

log = logging.getLogger("paceline")

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
    """One model's sizes and options; a model may have no eos, pad or bos token at all. A family may add fields."""

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

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """The configuration of a checkpoint: a Hugging Face folder, a GGUF file, or a known model by its name."""
        folder = checkpoint_path(path)
        if is_gguf(folder):
            from paceline.decoder.gguf.checkpoint import read_config  # loads PyTorch

            return cls.from_fields(Fields(read_config(folder), str(folder)))
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give the local folder of a Hugging Face checkpoint (with config.json), a "
                f"GGUF file, a known model's name ({', '.join(KNOWN_MODELS)}), or an id of the Hugging Face hub "
                "(owner/name)."
            )
        config = Fields(read_json_object(folder / "config.json"), str(folder / "config.json"))
        generation_file = folder / "generation_config.json"
        generation = Fields(read_json_object(generation_file) if generation_file.exists() else {}, str(generation_file))
        if unknown := unknown_keys(config, registry.family(config.text("model_type"), config.where).keys):
            log.warning(
                "%s: nobody here knows what %s asks for, and nothing is done about it; if it changes what the model "
                "computes, this will be another model",
                config.where,
                ", ".join(unknown),
            )
        return _parse(config, generation)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """The configuration in a ``config.json`` alone, to plan with; generation settings are not looked for."""
        return _parse(Fields(read_json_object(Path(path)), str(path)), Fields({}, str(path)))

    @classmethod
    def from_fields(cls, config: Fields) -> ModelConfig:
        """The configuration in an object laid out like ``config.json``, as part of another file."""
        return _parse(config, Fields({}, config.where))

    def to_dict(self) -> dict[str, object]:
        """Plain values under these field names (not Hugging Face's), ready for JSON."""
        return asdict(self)

    def fingerprint(self) -> str:
        """Hex sha256 over all fields: equal for equal configurations, in every process, on every machine."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def _parse(config: Fields, generation: Fields) -> ModelConfig:
    """Ask the family that config.json names."""
    unknown_keys(config, registry.family(config.text("model_type"), config.where).keys)  # refuses what it must
    return registry.family(config.text("model_type"), config.where).config(config, generation)


def standard(config: Fields, generation: Fields, *, share: float | None = None) -> ModelConfig:
    """The keys that most families have, with the defaults of transformers' LlamaConfig; sizes have no default.

    ``share`` is how much of a head rotary embeddings turn, where the family knows more than 1.

    Raises:
        CheckpointError: a key is missing or has a wrong value.
        UnknownArchitectureError: an option would change the computation in a way that is not implemented.
    """
    _refuse_options(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{config.where}: num_attention_heads = {num_heads} is not a multiple of num_key_value_heads = "
            f"{num_kv_heads}; correct the file."
        )
    head_dim = _head_dim(config, hidden_size, num_heads)
    max_positions = config.integer("max_position_embeddings", 2048)
    vocab_size = config.integer("vocab_size")
    eos, pad, bos = _special_ids(config, generation, vocab_size)
    return ModelConfig(
        model_type=config.text("model_type"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=_rope(config, head_dim, max_positions, share=share),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        hidden_act=config.text("hidden_act", "silu"),
        eos_token_ids=eos,
        pad_token_id=pad,
        bos_token_id=bos,
    )


def _refuse_options(config: Fields) -> None:
    if quantized := config.values.get("quantization_config"):
        check_quantization_config(quantized, str(config.where))
    if config.values.get("per_layer_config"):
        raise UnknownArchitectureError(
            f"{config.where}: per_layer_config gives layers different sizes, which is not supported; use a "
            "checkpoint whose layers are alike."
        )


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if config.values.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"{config.where}: hidden_size = {hidden_size} is not a multiple of num_attention_heads = "
            f"{num_heads} and there is no head_dim; correct the file."
        )
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise UnknownArchitectureError(
            f"{config.where}: head_dim = {head_dim} is odd, and rotary embeddings turn pairs of dimensions; "
            "use a model with even heads."
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
        # An explicit null in config.json means none; only a key that is not there at all takes the default.
        return () if key in config.values else tuple(i for i in default if i < vocab_size)

    pad, bos = ids("pad_token_id", ()), ids("bos_token_id", (1,))
    return ids("eos_token_id", (2,)), pad[0] if pad else None, bos[0] if bos else None


def _check_ids(where: str, key: str, ids: tuple[int, ...], *, vocab_size: int) -> None:
    outside = [token for token in ids if token >= vocab_size]
    if outside:
        raise CheckpointError(
            f"{where}: {key} {outside[0]} is outside the vocabulary of {vocab_size} ids; correct it, or "
            "remove the key if the model has no such token."
        )


def _rope(config: Fields, head_dim: int, max_positions: int, *, share: float | None) -> RopeConfig:
    # transformers 5 renamed rope_scaling; where a file has both it lets the old name win, and so do we.
    settings = [config.child(key) for key in ("rope_scaling", "rope_parameters")]
    rope = next((fields for fields in settings if fields is not None and fields.values), Fields({}, config.where))
    kind = rope.text("rope_type", rope.text("type", "default"))
    _refuse_rope(config, rope, kind, known=share)
    pairs = int(head_dim * (1.0 if share is None else share)) // 2
    # Some checkpoints keep this one outside the rope settings, and then transformers prefers it there.
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    needs_factor = kind in ("linear", "dynamic", "llama3")
    longrope = kind == "longrope"
    result = RopeConfig(
        type=kind,
        theta=rope.number("rope_theta", config.number("rope_theta", 10000.0)),
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
        short_factor=rope.numbers("short_factor", length=pairs) if longrope else (),
        long_factor=rope.numbers("long_factor", length=pairs) if longrope else (),
    )
    if result.theta <= 1.0:
        raise CheckpointError(f"{rope.where}: rope_theta = {result.theta} is not above 1; correct the file.")
    if kind == "llama3" and result.low_freq_factor >= result.high_freq_factor:
        raise CheckpointError(
            f"{rope.where}: low_freq_factor = {result.low_freq_factor} is not below high_freq_factor = "
            f"{result.high_freq_factor}; correct the file."
        )
    return result


def _refuse_rope(config: Fields, rope: Fields, kind: str, *, known: float | None) -> None:
    if kind not in ROPE_TYPES:
        raise UnknownArchitectureError(
            f"{rope.where}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}."
        )
    unknown = sorted(set(rope.values) - _ROPE_KEYS)
    if unknown:
        raise UnknownArchitectureError(
            f"{rope.where}: {unknown[0]!r} is not a rope setting known here, and passing over it could "
            "change the model's output; remove it if it has no effect."
        )
    for fields in (rope, config):
        share = fields.number("partial_rotary_factor", 1.0)
        if share != 1.0 and known is None:
            raise UnknownArchitectureError(
                f"{fields.where}: partial_rotary_factor = {share} is not supported; "
                "use a checkpoint that rotates whole heads (1.0)."
            )
