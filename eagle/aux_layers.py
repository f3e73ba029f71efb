"""Which residual streams of the target an EAGLE-3 head reads: the default, and what the ids of a checkpoint mean.

Stream i is what layer i reads: 0 is the embedding, L what the last of L layers leaves, before the final norm. Other
projects write ``eagle_aux_hidden_state_layer_ids`` in one of two ways without saying which: as streams, or as layers
whose *output* is read, which are the streams one further. SGLang's rule decides (pull request 25454): ids that
begin with 1 are outputs, all others are streams; ids of heads for gpt-oss are streams whatever they begin with (pull
request 32334). Not here: the target's layers themselves, and other keys of a head's config.json.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig

log = logging.getLogger("paceline")

KEY = "eagle_aux_hidden_state_layer_ids"
_STREAMS = frozenset({"gpt_oss"})
"""``model_type`` of targets whose heads write streams, also where the first is 1."""


def default_layers(count: int) -> tuple[int, int, int]:
    """The streams before layers 2, L/2 and L - 3 of a target with ``count`` layers, as in EAGLE's own code.

    Raises:
        ConfigurationError: with fewer than 7 layers these are not three different streams in ascending order.
    """
    layers = (2, count // 2, count - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ConfigurationError(
            "the default streams of an EAGLE-3 head, before layers 2, L/2 and L - 3, are not three different ones of a "
            f"target with {count} layers; name streams of 0 to {count}: --layers of a training, aux_layers of a draft"
        )
    return layers


def parse_layers(value: object) -> tuple[int, ...] | None:
    """The option ``aux_layers``: None, a stream, a list of streams, or text such as ``2,16,29``.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    numbers = [str(part).strip() for part in parts if isinstance(part, int | str) and not isinstance(part, bool)]
    if not parts or len(numbers) != len(parts) or not all(number.isdecimal() for number in numbers):
        raise ConfigurationError(
            f"aux_layers={value!r} must be residual streams of the target, as in 2,16,29: whole numbers from 0 on"
        )
    return tuple(map(int, numbers))


def layers_of(config: Fields, target: ModelConfig, override: Sequence[int] | None = None) -> tuple[int, ...]:
    """The streams that a checkpoint of another project reads of this target; which, and why, is logged.

    override  in place of what the checkpoint says

    Raises:
        CheckpointError: the ids are no list of layer numbers, or stand there twice and differ.
        ConfigurationError: the checkpoint names none, and the target is too small for the default.
    """
    ids, where = written_ids(config), config.where
    if override is not None:
        return overridden(where, ids or (), override)
    if ids is None:
        layers: tuple[int, ...] = default_layers(target.num_layers)
        log.info("%s names no layers: the head reads residual streams %s of the target", where, list(layers))
        return layers
    if ids[0] != 1 or target.model_type in _STREAMS:
        log.info("%s: the head reads residual streams %s of the target", where, list(ids))
        return ids
    layers = tuple(i + 1 for i in ids)
    log.warning(
        "%s: layer ids %s begin with 1 and are taken for layers whose output is read, as SGLang does: the head reads "
        "residual streams %s of the target; if that is wrong, set aux_layers=%s",
        where, list(ids), list(layers), ",".join(map(str, ids)),
    )  # fmt: skip
    return layers


def overridden(where: str, before: Sequence[int], layers: Sequence[int]) -> tuple[int, ...]:
    """The streams that the user asks for, which is logged beside what the checkpoint says (``before``)."""
    log.info(
        "%s: the head reads residual streams %s of the target, by aux_layers; the file says %s",
        where, list(layers), list(before) or "nothing",
    )  # fmt: skip
    return tuple(layers)


def written_ids(config: Fields) -> tuple[int, ...] | None:
    """``eagle_aux_hidden_state_layer_ids`` as they stand, at the top or in ``eagle_config``; None: in neither.

    Raises:
        CheckpointError: they are no list of layer numbers, or the two differ.
    """
    nested = config.child("eagle_config")
    top, inner = layer_ids(config, KEY), None if nested is None else layer_ids(nested, KEY)
    if top and inner and top != inner:
        raise CheckpointError(
            f"{config.where}: {KEY} is {list(top)}, and in eagle_config {list(inner)}; keep the one the head was "
            "trained with"
        )
    return top or inner or None


def layer_ids(fields: Fields, key: str) -> tuple[int, ...] | None:
    """A list of layer numbers, None where the key is absent.

    Raises:
        CheckpointError: it is no such list.
    """
    value = fields.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
        raise CheckpointError(f"{fields.where}: {key} is {value!r}, but must be a list of layer numbers from 0 on")
    return tuple(value)
