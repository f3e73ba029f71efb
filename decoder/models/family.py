"""What a model family says of a checkpoint: how its config.json is read, and which tensors it has.

No network is here, so that all of this is known without PyTorch: `Family.build` imports one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields as names_of
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import Activation, AssembledConfig, Blueprint, Names, tensors
from paceline.decoder.models.config import ModelConfig, standard
from paceline.decoder.parallel.sharding import Shard, TensorSpec

if TYPE_CHECKING:
    from paceline.decoder.kernels.protocol import Kernels
    from paceline.decoder.models.base import DecoderModel
    from paceline.decoder.models.layers import Weights
    from paceline.decoder.parallel.collectives import Collectives


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


_HEADS = re.compile(r"medusa_head(s?\.|_)\d+\..+")


class Family:
    """A subclass writes `config`, `tensors` and `build`."""

    ignored: ClassVar[re.Pattern[str] | None] = None
    """Names of tensors that a checkpoint may hold besides those of `tensors`, without any effect."""

    bare_prefix: ClassVar[str] = ""
    """What names of `tensors` begin with that a checkpoint of the network without its head leaves away."""

    keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of config.json that `config` reads, besides those of every family (`known_keys.STANDARD`)."""

    @classmethod
    def ignores(cls, name: str) -> bool:
        """Whether a checkpoint may hold a tensor of that name without any effect here.

        Of every family, heads that draft for it, in the names of Medusa and of NxD Inference: `paceline.medusa`'s.
        """
        return any(kind is not None and kind.fullmatch(name) for kind in (cls.ignored, _HEADS))

    @staticmethod
    def config(fields: Fields, generation: Fields) -> ModelConfig:
        """What config.json and generation_config.json say.

        Raises:
            CheckpointError: a key is missing or has a wrong value.
            UnknownArchitectureError: an option would change the computation in a way that the family does not follow.
        """
        raise NotImplementedError

    @classmethod
    def tensors(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of a checkpoint by its name, in the order of their use."""
        raise NotImplementedError

    @classmethod
    def build(
        cls, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives
    ) -> DecoderModel:
        """The network of a rank. Takes its tensors out of ``weights``, which holds the parts of ``shard`` by name."""
        raise NotImplementedError


class AssembledFamily(Family):
    """A family that a `Blueprint` describes. It says its `names`, and its `config` gives an `AssembledConfig`."""

    names: Names

    @classmethod
    def tensors(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        """See `Family`."""
        assert isinstance(config, AssembledConfig)
        return tensors(config, cls.names)

    @classmethod
    def build(
        cls, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives
    ) -> DecoderModel:
        """See `Family`."""
        from paceline.decoder.models.assembled import AssembledModel, Part

        return AssembledModel.of(Part(shard, kernels, group, cls.names), weights, positions)
