"""File formats of heads, as data: keys of a config.json, names of tensors. Checked without PyTorch.

A key that changes a head's computation and adds no tensor would be lost silently, and the head would draft badly. So
every key is read, known to have no effect, or must have its neutral value; others are rejected. null counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError, ConfigurationError, PairingError, UnknownArchitectureError
from paceline.core.types import FeatureSpec
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.models.config import HARMLESS, ModelConfig, RopeConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.decoder.weights.formats import WeightFormat

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class MustBe:
    """A key with some supported values; ``meaning`` describes the others."""

    values: tuple[object, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """Allowed keys of a config.json of heads.

    of      owner of the settings, for messages
    known   keys that are read, or have no effect on drafting, beside those of `HARMLESS`
    others  keys that must have one value
    begin   prefix of heads' keys in a file that also has the target's
    """

    of: str
    known: Set[str]
    others: Mapping[str, MustBe] = field(default_factory=dict)
    begin: str = ""

    def check(self, fields: Fields) -> None:
        """Raise UnknownArchitectureError unless every key is understood."""
        for key, value in fields.values.items():
            if value is None or not key.startswith(self.begin):
                continue
            rule = self.others.get(key)
            if rule is None and key not in self.known and key not in HARMLESS:
                raise UnknownArchitectureError(
                    f"{fields.where}: {key!r} is not a known setting of {self.of}, and ignoring it could lower the "
                    "acceptance rate; remove it if it has no effect"
                )
            if rule is not None and not any(type(value) is type(one) and value == one for one in rule.values):
                raise UnknownArchitectureError(
                    f"{fields.where}: {key}: expected {json.dumps(rule.values[0])}, got {json.dumps(value)}, which "
                    f"is not supported: {rule.meaning}; use a head with {key} = {json.dumps(rule.values[0])}"
                )


SHARED = (
    "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps",
    "max_position_embeddings", "rope", "vocab_size", "attention_bias", "mlp_bias",
)  # fmt: skip
"""Fields of `LayerSizes` that a `ModelConfig` has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes of the layers of a head, which are those of Llama or Qwen3, and what it reads and drafts.

    layers            the target's residual streams that are read (`paceline.core.types.FeatureSpec`)
    draft_vocab_size  number of ids that can be drafted
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    vocab_size: int
    draft_vocab_size: int
    attention_bias: bool = False
    mlp_bias: bool = False
    layers: tuple[int, ...] = ()

    @staticmethod
    def of(model: ModelConfig) -> dict[str, Any]:
        """Return the fields that are those of a model, by name."""
        return {name: getattr(model, name) for name in SHARED}

    @property
    def reads(self) -> FeatureSpec:
        """Hidden states of the target that the head reads."""
        return FeatureSpec(self.layers)

    def layer_shapes(self, width: int, *, input_norm: bool, qk_norm: bool) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the tensors of a layer that reads rows of ``width``."""
        size, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (size,)}
        if input_norm:
            shapes["input_layernorm.weight"] = (size,)
        if qk_norm:
            shapes |= {f"self_attn.{side}_norm.weight": (self.head_dim,) for side in "qk"}
        attention = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (size, queries)}
        mlp = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
        for part, matrices, biases in (("self_attn", attention, self.attention_bias), ("mlp", mlp, self.mlp_bias)):
            for name, shape in matrices.items():
                shapes[f"{part}.{name}_proj.weight"] = shape
                if biases:
                    shapes[f"{part}.{name}_proj.bias"] = shape[:1]
        return shapes


def read_config(folder: Path) -> Fields:
    return Fields(read_json_object(folder / CONFIG), str(folder / CONFIG))


def layer_ids(fields: Fields, key: str, *, least: int = 0, required: bool = False) -> tuple[int, ...]:
    """Return a list of layer numbers from ``least`` on, else raise CheckpointError; () for a key that may be absent."""
    value = fields.values.get(key)
    if value is None and not required:
        return ()
    whole = isinstance(value, list) and all(type(one) is int and one >= least for one in value)
    if not isinstance(value, list) or not whole or (required and not value):
        raise CheckpointError(
            f"{fields.where}: {key}: expected a list of layer numbers from {least} on, got {value!r}; correct the file"
        )
    return tuple(value)


def check_target(
    of: str, target: ModelConfig, *, vocab_size: int, hidden_size: int, layers: Sequence[int] = ()
) -> None:
    """Raise PairingError unless a head that reads the residual streams ``layers`` fits a target. ``of``: its name."""
    for name, own, other in (
        ("vocabulary", vocab_size, target.vocab_size),
        ("hidden size", hidden_size, target.hidden_size),
    ):
        if own != other:
            raise PairingError(
                f"draft: expected a target with {name} {own} for this {of}, got {other}; use the head that was "
                "trained for this target"
            )
    if any(not 0 <= layer <= target.num_layers for layer in layers):
        raise PairingError(
            f"draft: expected a target with the residual streams {tuple(layers)} that the {of} reads, got one of "
            f"{target.num_layers} layers; use the head that was trained for this target"
        )


def head_format(quantization: object) -> WeightFormat | None:
    """Return the requested format of a head's matrices; None: the target's ``amp``, or no request."""
    return None if quantization in (None, "amp") else WeightFormat.of(str(quantization))


def write_json(path: Path, values: object, *, indent: int | None = None) -> None:
    with atomic_write(path):
        path.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8")


def written_sizes(config: LayerSizes, *, num_layers: int, qk_norm: bool) -> dict[str, object]:
    """Return the layer's sizes by Hugging Face's names."""
    rope = {name: value for name, value in asdict(config.rope).items() if value not in (None, ())}
    kind, theta = rope.pop("type"), rope.pop("theta")
    rope.pop("max_position_embeddings")
    sizes: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if qk_norm else "llama",
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return sizes if kind == "default" else {**sizes, "rope_scaling": {"rope_type": kind, **rope}}


def check_layout(layout: str, layouts: Iterable[str]) -> None:
    if layout not in layouts:
        raise ConfigurationError(f"layout: expected one of {', '.join(layouts)}, got {layout!r}; use one of them")


Prefixes = Sequence[tuple[str, str]]
"""Prefixes of our tensor names, with the layout's replacements."""


def foreign_name(name: str, prefixes: Prefixes) -> str:
    """Return the layout's name of one of our tensors."""
    return next((theirs + name.removeprefix(ours) for ours, theirs in prefixes if name.startswith(ours)), name)


def own_name(name: str, prefixes: Prefixes) -> str:
    return foreign_name(name, [(theirs, ours) for ours, theirs in prefixes])


def sources(names: Mapping[str, str | None]) -> dict[str, str]:
    """Invert a map from names in a checkpoint to ours (None: no effect); CheckpointError: two names mean the same
    tensor.
    """
    found: dict[str, str] = {}
    for name, own in names.items():
        if own in found:
            raise CheckpointError(
                f"expected one {own} file in a folder, got {found[own]} and {name}; keep one layout in each folder"
            )
        if own is not None:
            found[own] = name
    return found
