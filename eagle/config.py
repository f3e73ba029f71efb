"""Configuration of an EAGLE head: its sizes, in our own folders' config.json, the streams that it reads, and the
options of drafting and training. It holds no weights.

Stream i of the target is the input of layer i: 0 is the embedding, L the output of the last of L layers, before the
final norm. Other projects write ``eagle_aux_hidden_state_layer_ids`` in one of two ways without saying which: as
streams, or as layers whose *output* is read, which are the streams one further. SGLang's rule decides (pull request
25454): ids that begin with 1 are outputs, all others are streams; ids of heads for gpt-oss are streams whatever they
begin with (pull request 32334).

Version 1 serves EAGLE-1 and EAGLE-2, which differ in how drafts grow and not in the head.
Formats of other projects are in `paceline.eagle.formats`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.options import option
from paceline.heads.layouts import LayerSizes, check_target, layer_ids, read_config
from paceline.heads.options import DraftTraining

log = logging.getLogger("paceline")

_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_STREAMS = frozenset({"gpt_oss"})
"""``model_type`` of targets whose heads store streams, even if the first id is 1."""


def default_layers(count: int) -> tuple[int, int, int]:
    """Return the streams before layers 2, L/2 and L - 3 of a target with ``count`` layers, as in EAGLE's own code;
    ConfigurationError: with fewer than 7 layers these are not three different ones in ascending order.
    """
    layers = (2, count // 2, count - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ConfigurationError(
            "aux_layers: the default residual streams of an EAGLE-3 head (before layers 2, L/2 and L - 3) are not "
            f"three different ones for a target of {count} layers; give streams from 0 to {count} (--aux-layers when "
            "training, aux_layers in a draft)"
        )
    return layers


def parse_layers(value: object) -> tuple[int, ...] | None:
    """Parse the option ``aux_layers``: None, a stream, a list of streams, or text such as ``2,16,29``."""
    if value is None:
        return None
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    numbers = [str(part).strip() for part in parts if isinstance(part, int | str) and not isinstance(part, bool)]
    if not parts or len(numbers) != len(parts) or not all(number.isdecimal() for number in numbers):
        raise ConfigurationError(
            "aux_layers: expected residual streams of the target as whole numbers from 0 on, such as 2,16,29, got "
            f"{value!r}; correct it"
        )
    return tuple(map(int, numbers))


def layers_of(config: Fields, target: ModelConfig, override: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the streams that another project's checkpoint reads of this target, or ``override``; log them with the
    reason. Raise CheckpointError unless the ids are layer numbers, the same where they occur twice.
    """
    ids, where = _written_ids(config), config.where
    if override is not None:
        return overridden(where, ids or (), override)
    if ids is None:
        layers: tuple[int, ...] = default_layers(target.num_layers)
        log.warning(
            "%s: no layers are configured: the head reads residual streams %s of the target, which is a guess; if few "
            "drafts are accepted, set aux_layers",
            where, list(layers),
        )  # fmt: skip
        return layers
    if ids[0] != 1 or target.model_type in _STREAMS:
        log.info("%s: the head reads residual streams %s of the target", where, list(ids))
        return ids
    layers = tuple(i + 1 for i in ids)
    log.warning(
        "%s: layer ids %s begin with 1 and are taken as layers whose outputs are read, as in SGLang: the head reads "
        "residual streams %s of the target; if that is wrong, set aux_layers=%s",
        where, list(ids), list(layers), ",".join(map(str, ids)),
    )  # fmt: skip
    return layers


def overridden(where: str, before: Sequence[int], layers: Sequence[int]) -> tuple[int, ...]:
    """Return the streams that the user requests; log them with the checkpoint's (``before``)."""
    log.info(
        "%s: the head reads residual streams %s of the target, as set by aux_layers; the file has %s",
        where, list(layers), list(before) or "nothing",
    )  # fmt: skip
    return tuple(layers)


def _written_ids(config: Fields) -> tuple[int, ...] | None:
    """Return ``eagle_aux_hidden_state_layer_ids`` from the top level or ``eagle_config``; None if absent from both."""
    nested = config.child("eagle_config")
    top, inner = (() if one is None else layer_ids(one, _LAYERS_KEY) for one in (config, nested))
    if top and inner and top != inner:
        raise CheckpointError(
            f"{config.where}: expected the same {_LAYERS_KEY} at the top level and in eagle_config, got {list(top)} "
            f"and {list(inner)}; keep the one the head was trained with"
        )
    return top or inner or None


def is_eagle_config(fields: Mapping[str, object]) -> bool:
    """Return whether a config.json describes an EAGLE head, in any layout.

    The EAGLE repository's own files describe the head as a Llama, of one layer or of as many as the target. They differ
    from such a model by the ``bias`` of ``fc`` (version 1), or the draft vocabulary (version 3).
    """
    if "paceline_eagle" in fields or "speculators_model_type" in fields:
        return True
    architectures = fields.get("architectures")
    names_eagle = isinstance(architectures, list) and any("eagle" in str(name).lower() for name in architectures)
    one_layer = fields.get("num_hidden_layers") == 1 and ("bias" in fields or "fc_bias" in fields)
    return names_eagle or "eagle_config" in fields or "draft_vocab_size" in fields or one_layer


LATER = ("qk_norm", "fc_norm", "norm_before_fc", "norm_output", "shares_output")
"""Settings of version 3 that are true or false, and false in EAGLE-3 as first published."""


def layer_prefix(index: int) -> str:
    """Return the prefix of our names of a layer's tensors."""
    return f"layers.{index}." if index else "layer."


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(LayerSizes):
    """One head. Widths: H of the head's stream, F of a feature (H of the target).

    version               1 or 3
    fc_bias               version 1: ``fc`` has a bias
    input_norm            version 1: the layer normalises its input, as usual layers do (EAGLE's own does not)
    norm_before_residual  version 3: the residual stream is the normalised hidden state
    num_layers            version 3: decoder layers; only the first reads tokens
    qk_norm               the heads of queries and keys are normalised, as in Qwen3
    fc_norm               EAGLE-3.1: every stream of the target is normalised by itself before ``fc``
    norm_before_fc        EAGLE-3.1: the joined streams are normalised before ``fc``
    norm_output           EAGLE-3.1: the state after the last norm is what the next draft reads
    shares_output         version 3: the output layer is the target's, as always in version 1
    mask_token            P-EAGLE: id that stands for a token not yet known; all drafts are made in one pass. None: the
                          drafts are made one after the other
    """

    version: int
    target_hidden_size: int
    fc_bias: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    num_layers: int = 1
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    shares_output: bool = False
    mask_token: int | None = None

    def __post_init__(self) -> None:
        check_version(self.version)
        if self.version == 1 and (new := self.of_version_3()):
            raise CheckpointError(
                f"{new[0]}: expected its default for an EAGLE-1 head, which has no such part, got "
                f"{getattr(self, new[0])}; use a head of version 3, or remove it"
            )
        if not 1 <= self.num_layers <= 1000 or (self.fc_norm and self.norm_before_fc):
            raise CheckpointError(
                "num_layers: expected 1 to 1000, and fc_norm or norm_before_fc but not both, got "
                f"{self.num_layers}, {self.fc_norm} and {self.norm_before_fc}; correct the file"
            )
        if self.mask_token is not None and not 0 <= self.mask_token < self.vocab_size:
            raise CheckpointError(
                f"mask_token: expected an id below the vocabulary size {self.vocab_size}, got {self.mask_token}; "
                "correct it"
            )
        sizes = (self.draft_vocab_size, self.hidden_size)
        if self.shares_output and sizes != (self.vocab_size, self.target_hidden_size):
            raise MissingWeightsError(
                "lm_head.weight: expected a separate output layer for a head that drafts "
                f"{self.draft_vocab_size} of {self.vocab_size} ids, or has another width than the target, got none; "
                "download the checkpoint in full"
            )
        if self.version == 3 and not self.layers:
            raise CheckpointError(
                "layers: expected the residual streams of the target that an EAGLE-3 head reads, got none; set layers"
            )
        if self.version == 1 and (self.layers or self.draft_vocab_size != self.vocab_size):
            raise CheckpointError(
                "layers: expected no layers and no reduced vocabulary for an EAGLE-1 head, which reads the last "
                "hidden state, got some; remove them"
            )
        if self.version == 1 and self.hidden_size != self.target_hidden_size:
            raise CheckpointError(
                f"hidden_size: expected the target's hidden size {self.target_hidden_size} for an EAGLE-1 head, "
                f"which predicts the target's hidden state, got {self.hidden_size}; correct it"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(
                f"draft_vocab_size: expected 1 to {self.vocab_size}, got {self.draft_vocab_size}; correct it"
            )

    def of_version_3(self) -> list[str]:
        """Return the settings that later heads of version 3 have (EAGLE-3.1, P-EAGLE) and plain ones do not."""
        names = [name for name in LATER if getattr(self, name)]
        names += ["num_layers"] if self.num_layers != 1 else []
        return names + (["mask_token"] if self.mask_token is not None else [])

    @property
    def owns_output(self) -> bool:
        return self.version == 3 and not self.shares_output

    @property
    def fc_norms(self) -> tuple[str, ...]:
        """Names of the norms of equal parts of the features, before ``fc``."""
        if self.norm_before_fc:
            return ("input_norm.weight",)
        return tuple(f"fc_norm.{i}.weight" for i in range(len(self.layers))) if self.fc_norm else ()

    @property
    def feature_size(self) -> int:
        """F, the width of the hidden states read from the target."""
        return self.target_hidden_size * max(1, len(self.layers))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a head except its vocabulary map, by our own names."""
        size, three = self.hidden_size, self.version == 3
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, self.feature_size if three else 2 * size)}
        if self.fc_bias:
            shapes["fc.bias"] = (size,)
        shapes |= {name: (self.feature_size // len(self.fc_norms),) for name in self.fc_norms}
        if self.mask_token is not None:
            shapes["mask_hidden"] = (self.feature_size,)
        if three:
            shapes |= {"norm.weight": (size,), "layer.hidden_norm.weight": (size,)}
        if self.owns_output:
            shapes["lm_head.weight"] = (self.draft_vocab_size, size)
        for index in range(self.num_layers):
            width = 2 * size if three and not index else size  # the first of version 3 reads a token and a state
            layer = self.layer_shapes(width, input_norm=three or self.input_norm, qk_norm=self.qk_norm)
            shapes |= {layer_prefix(index) + name: shape for name, shape in layer.items()}
        return shapes

    def check_target(self, target: ModelConfig) -> None:
        sizes = {"vocab_size": self.vocab_size, "hidden_size": self.target_hidden_size}
        check_target("EAGLE head", target, layers=self.layers, **sizes)


def check_own(folder: Path, target: ModelConfig) -> None:
    """Raise PairingError if a folder in our own layout holds a head for another target; tensors tell of others."""
    fields = read_config(folder)
    if "paceline_eagle" in fields.values:
        parse_own(fields).check_target(target)


def check_version(version: int) -> None:
    if version not in (1, 3):
        raise CheckpointError(f"version: expected 1 (also for EAGLE-2) or 3, got {version}; correct it")


def parse_own(fields: Fields) -> EagleConfig:
    """Parse the configuration of a folder in our own layout; CheckpointError: a key is missing, unknown or of the wrong
    kind.
    """
    names = EagleConfig.__dataclass_fields__
    unknown = sorted(set(fields.values) - set(names) - {"paceline_eagle"})
    if unknown:
        raise CheckpointError(f"{fields.where}: {unknown[0]!r} is not a setting of an EAGLE head; remove it")
    return EagleConfig(**_filled(EagleConfig, fields))


def _filled(kind: type[EagleConfig | RopeConfig], fields: Fields) -> dict[str, Any]:
    """Return the values of a dataclass, each read by its annotation."""

    def numbers(name: str, _: object) -> tuple[float, ...]:
        value = fields.values.get(name)
        return fields.numbers(name, length=len(value) if isinstance(value, list) else 0)

    def optional_id(name: str, _: object) -> int | None:
        return None if fields.values.get(name) is None else fields.integer(name, minimum=0)

    read: dict[str, Callable[[str, Any], object]] = {
        "int": fields.integer,
        "float": fields.number,
        "bool": fields.flag,
        "str": fields.text,
        "int | None": optional_id,
        "float | None": lambda name, _: fields.optional_number(name),
        "tuple[int, ...]": lambda name, _: layer_ids(fields, name),
        "tuple[float, ...]": numbers,
        "RopeConfig": lambda *_: _rope(fields),
    }
    asked = dataclasses.fields(kind)
    return {one.name: read[str(one.type)](one.name, None if one.default is MISSING else one.default) for one in asked}


def _rope(fields: Fields) -> RopeConfig:
    rope = fields.child("rope")
    names = set(RopeConfig.__dataclass_fields__)
    if rope is None or not names - {"share"} <= set(rope.values) <= names:  # older files have no share
        raise CheckpointError(
            f"{fields.where}: rope: expected an object with the keys {', '.join(names)}, got "
            f"{fields.values.get('rope')!r}; correct the file"
        )
    return RopeConfig(**_filled(RopeConfig, rope))


@dataclass(frozen=True, slots=True)
class EagleHeadOptions:
    """The head to train. For version 1, ``layers`` only select the stored streams, so that a head of version 3 may use
    them too. Of ``start``, version, layers and drafted ids are kept.
    """

    version: int = option(3, "EAGLE version: 1 (also for EAGLE-2) or 3.", names=("--eagle-version",))
    layers: tuple[int, ...] = option(
        (),
        "Version 3: residual stream of the target to read; repeatable. Default: those before layers 2, L/2 and L - 3.",
        names=("--aux-layers",),
    )
    draft_vocab_size: int | None = option(
        None, "Version 3: number of token ids that can be drafted. Default: the whole vocabulary."
    )
    num_layers: int = option(1, "Version 3: number of decoder layers of the head.", names=("--head-layers",))
    qk_norm: bool = option(False, "Version 3: normalise the heads of queries and keys, as Qwen3 does.")
    fc_norm: bool = option(False, "EAGLE-3.1: normalise every stream of the target before it is joined.")
    norm_output: bool = option(False, "EAGLE-3.1: later drafts read the state after the last norm.")
    peagle: bool = option(False, "P-EAGLE: a head that makes all drafts in one pass.")
    mask_token: int | None = option(
        None, "P-EAGLE: id that stands for tokens not yet known. Default: the rarest of the data."
    )
    depth: int = option(5, "Number of draft tokens of the chains that acceptance is measured on.")
    start: Path | None = option(None, "Folder of a head to continue training from. Default: a new head.")

    def parts(self) -> list[str]:
        """Return the names of what is asked for and heads of EAGLE-3 do not have."""
        flags = [name for name in ("qk_norm", "fc_norm", "norm_output", "peagle") if getattr(self, name)]
        return flags + (["num_layers"] if self.num_layers != 1 else [])


@dataclass(frozen=True, slots=True)
class EagleTraining(DraftTraining):
    """Options for training an EAGLE head, in addition to those of every drafter.

    replay  weight of the loss on the head's own drafts where it was wrong (Draft-OPD, arXiv 2605.29343)
    """

    ttt_steps: int | None = option(None, "Number of passes of the training-time test. Default: 7; version 1: 1.")
    ttt_decay: float = option(0.8, "Weight of a pass relative to the previous one, above 0 and at most 1.")
    feature_weight: float = option(1.0, "Version 1: weight of the feature loss.")
    ce_weight: float = option(0.1, "Version 1: weight of the cross-entropy loss.")
    replay: float = option(
        0.0, "Weight of the loss on the head's own drafts, from places where it was wrong. Default: 0."
    )

    def __post_init__(self) -> None:
        DraftTraining.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if (self.ttt_steps is not None and self.ttt_steps < 1) or not 0 < self.ttt_decay <= 1:
            raise ConfigurationError(
                "expected positive tokens and ttt_steps, and ttt_decay above 0 and at most 1, got other values; "
                "correct them"
            )
        if not all(0 <= weight < math.inf for weight in (self.feature_weight, self.ce_weight, self.replay)):
            raise ConfigurationError(
                "expected feature_weight, ce_weight and replay of at least 0, got less; correct them"
            )

    @property
    def decay(self) -> float | None:
        """Weight of a pass relative to the previous one; None: D-PACE's."""
        return None if self.dpace else self.ttt_decay

    def passes(self, version: int) -> int:
        if self.ttt_steps is None:
            return 7 if version == 3 else 1
        return self.ttt_steps
