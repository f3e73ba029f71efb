"""What a model family says of a checkpoint: how its config.json is read, and which tensors it has.

No network is here, so that all of this is known without PyTorch: `Family.build` imports one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig, Names, tensors
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Shard, TensorSpec

if TYPE_CHECKING:
    from paceline.decoder.kernels.protocol import Kernels
    from paceline.decoder.models.base import DecoderModel
    from paceline.decoder.models.layers import Weights
    from paceline.decoder.parallel.collectives import Collectives

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
        from paceline.decoder.models.assembled import AssembledModel
        from paceline.decoder.models.part import Part

        return AssembledModel.of(Part(shard, kernels, group, cls.names), weights, positions)
