"""From a family's config.json to an `AssembledConfig`: other names for keys, defaults, and values that are refused.

What several families read alike is here; what a single one means by its keys is in its own module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields as names_of
from dataclasses import replace

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import Activation, AssembledConfig, Blueprint
from paceline.decoder.models.config import ModelConfig, standard

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu tanh",
    "gelu_fast": "gelu tanh",
    "gelu_pytorch_tanh": "gelu tanh",
    "relu": "relu",
}


def translated(config: Fields, renamed: Mapping[str, str], defaults: Mapping[str, object]) -> Fields:
    """A file whose keys have the names that most families use, and what it does not say, said.

    A special token that the file says is null stays none, and one outside of a small vocabulary is not made up.
    """
    values = {renamed.get(key, key): value for key, value in config.values.items()}
    size = config.integer("vocab_size")
    for key, value in defaults.items():
        special = key.endswith("_token_id")
        if key in values and (special or values[key] is not None):
            continue
        if not special or (isinstance(value, int) and value < size):
            values[key] = value
    return Fields(values, config.where)


def activation(config: Fields, key: str = "hidden_act") -> Activation:
    """The activation that a key names."""
    name = config.text(key)
    if name not in _ACTIVATIONS:
        raise UnknownArchitectureError(
            f"{config.where}: {key} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def sliding(config: Fields, *, default: tuple[bool, ...]) -> tuple[int, ...]:
    """The window of each layer, 0 for none. ``layer_types`` says which slide; where it is missing, ``default``."""
    count = config.integer("num_hidden_layers")
    kinds = config.values.get("layer_types")
    if kinds is None:
        slides = default
    else:
        if not isinstance(kinds, list) or len(kinds) != count:
            raise CheckpointError(f"{config.where}: layer_types must be a list of {count} kinds; correct the file.")
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise UnknownArchitectureError(f"{config.where}: layer_types has {kind!r}, which is not supported.")
        slides = tuple(kind == "sliding_attention" for kind in kinds)
    if config.values.get("sliding_window") is None:
        return (0,) * count
    return tuple(config.integer("sliding_window") if slide else 0 for slide in slides)


def everywhere(config: Fields) -> tuple[int, ...]:
    """The window of each layer, where all have the same."""
    return sliding(config, default=(True,) * config.integer("num_hidden_layers"))


def share_turned(config: Fields, default: float = 1.0) -> float:
    """How much of a head rotary embeddings turn: ``partial_rotary_factor``, of the file or of its rope settings."""
    for fields in (config.child("rope_parameters"), config.child("rope_scaling"), config):
        if fields is not None and fields.values.get("partial_rotary_factor") is not None:
            return fields.number("partial_rotary_factor")
    return default


def assembled(config: Fields, generation: Fields, plan: Blueprint, *, share: float = 1.0) -> AssembledConfig:
    """The configuration of a translated file. ``share`` of each head is turned by rotary embeddings; 0: none."""
    base = standard(config, generation, share=share)
    plan = replace(plan, rotated=int(base.head_dim * share))
    if plan.rotated % 2:
        raise UnknownArchitectureError(
            f"{config.where}: rotary embeddings would turn {plan.rotated} dimensions of a head, which is odd."
        )
    return AssembledConfig(**{one.name: getattr(base, one.name) for one in names_of(ModelConfig)}, blueprint=plan)
