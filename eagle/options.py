"""Options of an EAGLE head: of a draft, of the head that is trained, and of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.formats import WeightFormat
from paceline.eagle.aux_layers import parse_layers
from paceline.training.options import TEXTS_PER_FILE, TrainingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions:
    """Options of a draft; what they mean is said at `paceline.auto_drafter.AutoDrafter`.

    Raises:
        ConfigurationError: one is out of range.
    """

    draft_tree: object = None
    aux_layers: object = None
    divided: object = None
    quantization: object = None

    def __post_init__(self) -> None:
        parse_layers(self.aux_layers)
        head_format(self.quantization)


def head_format(quantization: object) -> WeightFormat | None:
    """The format that is asked for of a head's matrices; None: that of the target's ``amp``, or nothing is asked for.

    Raises:
        ConfigurationError: there is no such format.
    """
    return None if quantization in (None, "amp") else WeightFormat.of(str(quantization))


@dataclass(frozen=True, slots=True)
class EagleHeadOptions:
    """Which head is trained.

    version           1 (also for EAGLE-2) or 3
    layers            version 3: the target's residual streams it reads; empty = those before layers 2, L/2 and L - 3,
                      as in EAGLE's own code. For version 1 they only decide what is kept, so that a head of version 3
                      may use it too
    draft_vocab_size  version 3: the most frequent ids of the data, so many; None = all
    depth             of the chains whose acceptance is measured
    start             folder of a head to train on; its version, layers and drafted ids are kept
    """

    version: int = field(default=3, metadata={"help": "1 (also for EAGLE-2) or 3."})
    layers: tuple[int, ...] = field(
        default=(),
        metadata={"help": "Version 3: a residual stream to read; repeatable. Default: before layers 2, L/2, L - 3."},
    )
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Version 3: so many ids can be drafted."})
    depth: int = field(default=5, metadata={"help": "Of the chains whose acceptance is measured."})
    start: Path | None = field(default=None, metadata={"help": "Folder of a head to train on; default: a fresh one."})


@dataclass(frozen=True, slots=True)
class EagleTraining(TrainingOptions):
    """How an EAGLE head is trained; the other options are those of every training.

    learning_rate   2e-3 by default
    batch_size      a divisor of `TEXTS_PER_FILE`, so that every text has its turn
    tokens          in all, repeats of a text counted again
    ttt_steps       passes of the training-time test; 1 = only on the target's own features; None = 7, version 1: 1
    ttt_decay       weight of a pass, in terms of the one before
    feature_weight  of the feature loss (version 1 only)
    ce_weight       of the cross-entropy (version 1 only)

    Raises:
        ConfigurationError: a number is out of range.
    """

    learning_rate: float = field(default=2e-3, metadata={"help": "Largest learning rate."})
    tokens: int = field(default=1_000_000, metadata={"help": "Tokens to train on, repeats counted."})
    ttt_steps: int | None = field(
        default=None, metadata={"help": "Passes of the training-time test. Default: 7; version 1: 1."}
    )
    ttt_decay: float = field(default=0.8, metadata={"help": "Weight of a pass in terms of the one before."})
    feature_weight: float = field(default=1.0, metadata={"help": "Version 1: of the feature loss."})
    ce_weight: float = field(default=0.1, metadata={"help": "Version 1: of the cross-entropy."})

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if self.tokens < 1 or (self.ttt_steps is not None and self.ttt_steps < 1) or not 0 < self.ttt_decay <= 1:
            raise ConfigurationError("tokens and ttt_steps must be positive, and ttt_decay in (0, 1]")
        if not (0 <= self.feature_weight < math.inf and 0 <= self.ce_weight < math.inf):
            raise ConfigurationError("feature_weight and ce_weight must be 0 or more")
        if TEXTS_PER_FILE % self.batch_size:
            raise ConfigurationError(
                f"batch_size={self.batch_size} leaves texts out: give a divisor of {TEXTS_PER_FILE}"
            )

    def passes(self, version: int) -> int:
        """Passes of the training-time test for a head of this version."""
        if self.ttt_steps is None:
            return 7 if version == 3 else 1
        return self.ttt_steps
