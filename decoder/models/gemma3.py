"""The text models of the Gemma 3 family: Gemma 2 with head norms, and a rotation of its own in layers that slide."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import CheckpointError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.gemma2 import DEFAULTS, GEMMA_KEYS, GEMMA_NAMES, gemma_plan
from paceline.decoder.models.reading import assembled, translated


class Gemma3Family(AssembledFamily):
    """See `Family`."""

    bare_prefix = "model."

    names = GEMMA_NAMES

    keys = GEMMA_KEYS | {"_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"}

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Gemma3TextConfig, except that sizes have none."""
        config = translated(fields, {}, {**DEFAULTS, "max_position_embeddings": 131072})
        pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
        full, local = _rotations(config)
        plan = replace(gemma_plan(config, full=lambda layer: (layer + 1) % pattern == 0), head_norms=True)
        slow = assembled(local, generation, plan).rope
        return assembled(full, generation, replace(plan, local_rope=slow))


def _rotations(config: Fields) -> tuple[Fields, Fields]:
    """The file as a layer that sees all reads it, and as one that slides: each with one set of rope settings.

    transformers 5 writes both below ``rope_parameters``; 4 wrote ``rope_theta``, ``rope_scaling`` and
    ``rope_local_base_freq``.
    """
    rest = {key: value for key, value in config.values.items() if key not in ("rope_parameters", "rope_scaling")}
    both = config.child("rope_parameters")
    if both is not None and {"full_attention", "sliding_attention"} & set(both.values):
        sides = both.child("full_attention"), both.child("sliding_attention")
        if sides[0] is None or sides[1] is None or len(both.values) > 2:
            raise CheckpointError(f"{both.where}: full_attention and sliding_attention must both be there, alone.")
        full, local = ({**rest, "rope_parameters": side.values} for side in sides if side is not None)
    else:
        base = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
        full = {**config.values, "rope_theta": base[0]}
        local = {**rest, "rope_theta": base[1]}
    return Fields(full, config.where), Fields(local, config.where)
