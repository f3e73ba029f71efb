"""The sizes of an EAGLE head, and the config.json our own folders keep them in. No weights in here.

Version 1 serves EAGLE-1 and EAGLE-2, which differ in how drafts grow and not in the head.
Not here: how other projects write the same facts (`paceline.eagle.formats`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError, PairingError
from paceline.core.types import FeatureSpec
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.rope_config import RopeConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.eagle.aux_layers import layer_ids

CONFIG = "config.json"


def is_eagle_config(fields: Mapping[str, object]) -> bool:
    """Whether the keys of a config.json say that the folder holds an EAGLE head, in whatever layout.

    The EAGLE repository's own files describe the head as a Llama, of one layer or of as many as the target. What tells
    them from such a model is the ``bias`` of ``fc`` (version 1), or the draft vocabulary (version 3).
    """
    if "paceline_eagle" in fields or "speculators_model_type" in fields:
        return True
    architectures = fields.get("architectures")
    names_eagle = isinstance(architectures, list) and any("eagle" in str(name).lower() for name in architectures)
    one_layer = fields.get("num_hidden_layers") == 1 and ("bias" in fields or "fc_bias" in fields)
    return names_eagle or "eagle_config" in fields or "draft_vocab_size" in fields or one_layer


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """One head. Widths: H of the head's stream, F of a feature (H of the target).

    version               1 or 3
    fc_bias               version 1: ``fc`` has a bias
    input_norm            version 1: the layer normalises what it reads, as usual layers do (EAGLE's own does not)
    norm_before_residual  version 3: the residual stream is the normalised hidden state
    layers                version 3: the target's residual streams that are read (`paceline.core.types.FeatureSpec`)
    draft_vocab_size      version 3: how many ids the head can draft; version 1 drafts all of them
    """

    version: int
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
    target_hidden_size: int
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_version(self.version)
        if self.version == 3 and not self.layers:
            raise CheckpointError("an EAGLE-3 head must say which residual streams of the target it reads: set layers")
        if self.version == 1 and (self.layers or self.draft_vocab_size != self.vocab_size):
            raise CheckpointError("an EAGLE-1 head reads the last hidden state and drafts the whole vocabulary")
        if self.version == 1 and self.hidden_size != self.target_hidden_size:
            raise CheckpointError(
                f"an EAGLE-1 head predicts the target's hidden state and so has its width, {self.target_hidden_size}, "
                f"not {self.hidden_size}"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(f"draft_vocab_size must be 1 to {self.vocab_size}, not {self.draft_vocab_size}")

    @property
    def reads(self) -> FeatureSpec:
        """What the head reads of the target."""
        return FeatureSpec(self.layers)

    @property
    def feature_size(self) -> int:
        """F, the width of what is read of the target."""
        return self.target_hidden_size * max(1, len(self.layers))

    @property
    def qkv_size(self) -> int:
        """Width of what queries, keys and values are made from."""
        return self.hidden_size * (2 if self.version == 3 else 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a head besides its vocabulary map, by our own names."""
        size, inner, three = self.hidden_size, self.intermediate_size, self.version == 3
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, self.feature_size if three else 2 * size)}
        if self.fc_bias:
            shapes["fc.bias"] = (size,)
        if three:
            shapes |= {"norm.weight": (size,), "lm_head.weight": (self.draft_vocab_size, size)}
            shapes["layer.hidden_norm.weight"] = (size,)
        if three or self.input_norm:
            shapes["layer.input_layernorm.weight"] = (size,)
        shapes["layer.post_attention_layernorm.weight"] = (size,)
        attention = {"q": (queries, self.qkv_size), "k": (keys, self.qkv_size), "v": (keys, self.qkv_size)}
        for side, shape in {**attention, "o": (size, queries)}.items():
            shapes[f"layer.self_attn.{side}_proj.weight"] = shape
            if self.attention_bias:
                shapes[f"layer.self_attn.{side}_proj.bias"] = shape[:1]
        for part, shape in {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}.items():
            shapes[f"layer.mlp.{part}_proj.weight"] = shape
            if self.mlp_bias:
                shapes[f"layer.mlp.{part}_proj.bias"] = shape[:1]
        return shapes

    def check_target(self, target: ModelConfig) -> None:
        """Raise PairingError unless the head fits this target."""
        for name, head_value, target_value in (
            ("vocabulary", self.vocab_size, target.vocab_size),
            ("hidden size", self.target_hidden_size, target.hidden_size),
        ):
            if head_value != target_value:
                raise PairingError(
                    f"the EAGLE head is for a target with {name} {head_value}, and this one has {target_value}; "
                    "use the head that was trained for this target"
                )
        if any(not 0 <= layer <= target.num_layers for layer in self.layers):
            raise PairingError(
                f"the EAGLE head reads residual streams {self.layers}, and the target has {target.num_layers} layers; "
                "use the head that was trained for this target"
            )

    def write(self, folder: Path) -> None:
        """Write config.json, in our own form."""
        text = json.dumps({"paceline_eagle": 1, **asdict(self)}, indent=2) + "\n"
        with atomic_write(folder / CONFIG):
            (folder / CONFIG).write_text(text, encoding="utf-8")


def check_own(folder: Path, target: ModelConfig) -> None:
    """Raise PairingError if a folder in our own layout holds a head for another target. Others name what they hold by
    their tensors.
    """
    fields = read_json_object(folder / CONFIG)
    if "paceline_eagle" in fields:
        parse_own(Fields(fields, str(folder / CONFIG))).check_target(target)


def check_version(version: int) -> None:
    """Raise CheckpointError unless there is such a version."""
    if version not in (1, 3):
        raise CheckpointError(f"version {version} of an EAGLE head is unknown; give 1 (also for EAGLE-2) or 3")


def parse_own(fields: Fields) -> EagleConfig:
    """The configuration that `EagleConfig.write` wrote.

    Raises:
        CheckpointError: a key is missing, unknown or of the wrong kind.
    """
    names = EagleConfig.__dataclass_fields__
    unknown = sorted(set(fields.values) - set(names) - {"paceline_eagle"})
    if unknown:
        raise CheckpointError(f"{fields.where}: {unknown[0]!r} is no setting of an EAGLE head; remove it")
    numbers = ("version", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    sizes = ("max_position_embeddings", "vocab_size", "draft_vocab_size", "target_hidden_size")
    flags = ("attention_bias", "mlp_bias", "fc_bias", "input_norm", "norm_before_residual")
    plain: dict[str, Any] = {name: fields.integer(name) for name in (*numbers, *sizes)}
    plain |= {name: fields.flag(name, False) for name in flags}
    return EagleConfig(
        **plain,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields),
        layers=layer_ids(fields, "layers") or (),
    )


def _rope(fields: Fields) -> RopeConfig:
    rope = fields.child("rope")
    names = RopeConfig.__dataclass_fields__
    if rope is None or set(rope.values) != set(names):
        raise CheckpointError(f"{fields.where}: rope must be an object with the keys {', '.join(names)}")
    plain: dict[str, object] = {
        "type": rope.text("type"),
        "truncate": rope.flag("truncate", True),
        **{name: rope.integer(name) for name in ("max_position_embeddings", "original_max_position_embeddings")},
        **{
            name: rope.number(name)
            for name in ("theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        },
        **{name: rope.optional_number(name) for name in ("factor", "attention_factor", "mscale", "mscale_all_dim")},
    }
    for name in ("short_factor", "long_factor"):
        value = rope.values[name]
        plain[name] = rope.numbers(name, length=len(value) if isinstance(value, list) else 0)
    return RopeConfig(**plain)  # type: ignore[arg-type]  # every field by its name and of its kind
