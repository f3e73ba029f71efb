"""Options of every kind of head: the drafts that are asked for, training, and its sequences."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from paceline.core.errors import ConfigurationError
from paceline.decoder.options import option

EVAL_SAMPLES = "Number of sequences to evaluate on, which are not trained on."

TEXTS_PER_FILE = 64
"""Sequences whose hidden states are kept in one file."""

LOSSES = ("ce", "lk_hybrid", "nla")
"""Names of the losses of `paceline.heads.losses`."""

_GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class Wanted:
    """The drafts that are asked for: ``k`` tokens; ``drawn``: sampled from the drafter's probabilities."""

    k: int
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options for training heads; ConfigurationError: a value is out of range."""

    batch_size: int = option(8, "Number of sequences per step.")
    learning_rate: float = option(1e-3, "Peak learning rate.")
    precision: str = option(
        "f32", "Precision of matrix products: f32, or bf16, which is faster on CPUs with instructions for it."
    )
    device: str = option("cpu", "Device for training: cpu, cuda or cuda:N.")
    max_minutes: float | None = option(
        None, "Minutes after which training stops; run the command again to resume. Default: no limit."
    )

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 < self.learning_rate < math.inf:
            raise ConfigurationError("expected a positive batch_size and learning_rate, got other values; correct them")
        if self.max_minutes is not None and not self.max_minutes >= 0:
            raise ConfigurationError(
                f"max_minutes: expected at least 0, or None for no limit, got {self.max_minutes}; correct it"
            )
        from paceline.heads.frozen_model import check_device, products  # loads PyTorch

        products(self.precision)
        check_device(self.device)

    def resume_key(self) -> dict[str, object]:
        """Facts that must be the same when a run is resumed. The device may differ."""
        return {name: value for name, value in asdict(self).items() if name not in {"max_minutes", "device"}}


@dataclass(frozen=True, slots=True)
class DraftTraining(TrainingOptions):
    """Options for training a head, or a decoder, that drafts chains.

    batch_size  a divisor of `TEXTS_PER_FILE`, so that every sequence is used
    loss        "ce", or a loss that aims at the acceptance rate (LK, arXiv 2602.23881): "lk_hybrid" or "nla"
    dpace       weights of a chain's drafts by D-PACE (arXiv 2605.18810) in place of falling ones
    """

    learning_rate: float = option(2e-3, "Peak learning rate.")
    tokens: int = option(1_000_000, "Number of tokens to train on, repeats included.")
    loss: str = option("ce", "Loss on a draft's distribution: ce (cross-entropy), lk_hybrid or nla (acceptance rate).")
    dpace: bool = option(False, "Weights of the drafts of a chain by D-PACE: most where chains end most.")

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:  # before PyTorch is loaded
            raise ConfigurationError(f"loss: expected one of {', '.join(LOSSES)}, got {self.loss!r}; use one of them")
        TrainingOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if self.tokens < 1:
            raise ConfigurationError(f"tokens: expected at least 1, got {self.tokens}; raise it")
        if TEXTS_PER_FILE % self.batch_size:
            raise ConfigurationError(
                f"batch_size: expected a divisor of {TEXTS_PER_FILE}, got {self.batch_size}; change it, since the "
                "remaining sequences would be left out"
            )


@dataclass(frozen=True, slots=True)
class BlockTraining(DraftTraining):
    """Options for training a drafter that drafts a block in one pass; without ``dpace`` a draft's weight falls with
    ``decay``.
    """

    k: int = option(7, "Number of draft tokens of a block.", names=("--k",))
    anchors: int = option(32, "Number of blocks of a sequence in one step.")
    decay: float = option(0.8, "Weight of a draft relative to the one before, above 0 and at most 1.")

    def __post_init__(self) -> None:
        DraftTraining.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if self.k < 1 or self.anchors < 1 or not 0 < self.decay <= 1:
            raise ConfigurationError(
                "expected k and anchors of at least 1, and decay above 0 and at most 1, got "
                f"{self.k}, {self.anchors} and {self.decay}; correct them"
            )


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for making sequences; those to evaluate on are written by the target, greedily."""

    length: int = option(256, "Number of tokens per sequence.")
    prompt: int | None = option(
        None,
        "Number of prompt tokens per sequence, which the target continues. Default: a quarter of --length.",
        names=("--prompt-tokens",),
    )
    eval_samples: int = option(64, EVAL_SAMPLES)

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_length < self.length or self.eval_samples < 1:
            raise ConfigurationError(
                "prompt: expected 1 <= prompt < length, and eval_samples of at least 1, got other values; correct them"
            )

    @property
    def prompt_length(self) -> int:
        return self.length // 4 if self.prompt is None else self.prompt

    def check_room(self, longest: int, ahead: int) -> None:
        """Raise ConfigurationError unless sequences fit a target of ``longest`` positions, with ``ahead`` drafted
        tokens.
        """
        if not self.prompt_length + ahead < self.length <= longest:
            raise ConfigurationError(
                f"length: expected at most {longest} tokens (what the target reads) and {ahead} draft positions "
                f"after the prompt of {self.prompt_length}, got {self.length}; shorten the sequences or the prompt"
            )


@dataclass(frozen=True, slots=True)
class CachedTextOptions(TextOptions):
    """Options for making sequences, and for storing their hidden states."""

    feature_cache_gb: float = option(2.0, "Hidden states to keep on disk, in GB; 0 keeps none.")
    seed: int = option(0, "Seed of the order of the sequences.")

    def __post_init__(self) -> None:
        TextOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if not 0 <= self.feature_cache_bytes < math.inf:
            raise ConfigurationError(
                f"feature_cache_gb: expected a size in gigabytes, got {self.feature_cache_gb}; give 0 to keep nothing"
            )

    @property
    def feature_cache_bytes(self) -> float:
        return self.feature_cache_gb * _GIGABYTE
