"""Sizes of a set of Medusa heads, in their config.json, and the options of drafting and training.

The keys are those of Medusa's own checkpoints (Cai et al., arXiv 2401.10774), followed by two of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigurationError, UnknownArchitectureError
from paceline.decoder.options import option
from paceline.heads.layouts import HeadKeys, read_config
from paceline.heads.options import TextOptions, TrainingOptions

# Every key of heads; other keys are allowed in the target's file with these added.
_KEYS = HeadKeys("Medusa heads", {"medusa_num_heads", "medusa_num_layers", "medusa_tied_projection"}, begin="medusa")


def is_medusa_config(fields: Mapping[str, object]) -> bool:
    """Return whether a config.json describes Medusa heads, in any layout."""
    return "medusa_num_heads" in fields or fields.get("model_type") == "medusa"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of the heads.

    heads   head i predicts the token i + 2 positions after the last token the target has read
    layers  residual blocks of each head
    tied    the heads have no projection of their own and use the target's output layer
    base    name or path of the target in the checkpoint; "" if absent
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    tied: bool
    base: str = ""

    def __post_init__(self) -> None:
        for name in ("heads", "hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"{name}: expected at least 1 for Medusa heads, got {getattr(self, name)}; correct it"
                )
        if self.layers < 0 or (self.tied and not self.layers):
            raise ConfigurationError(
                f"layers: expected at least 1 for Medusa heads without their own projection, got {self.layers}; "
                "raise it, or untie the heads"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, by our own names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            for layer in range(self.layers):
                shapes[f"heads.{head}.blocks.{layer}.weight"] = (self.hidden_size, self.hidden_size)
                shapes[f"heads.{head}.blocks.{layer}.bias"] = (self.hidden_size,)
            if not self.tied:
                shapes[f"heads.{head}.projection.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def written(self) -> dict[str, object]:
        return {
            "medusa_num_heads": self.heads,
            "medusa_num_layers": self.layers,
            "base_model_name_or_path": self.base,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "medusa_tied_projection": self.tied,
        }


@dataclass(frozen=True, slots=True)
class Claims:
    """Contents of a config.json; published files are incomplete and sometimes wrong, so tensors decide. None: no such
    key.
    """

    heads: int | None
    layers: int | None
    base: str
    tied: bool | None

    @classmethod
    def read(cls, folder: Path) -> Claims:
        """Read a folder's config.json; UnknownArchitectureError: a key of heads is not understood, or it is vLLM's own
        layout.
        """
        fields = read_config(folder)
        if fields.values.get("model_type") == "medusa":
            raise UnknownArchitectureError(
                f"{fields.where}: model_type 'medusa' is vLLM's layout (blocks.0.layers.0, lm_heads.0, perhaps with "
                "a reduced vocabulary), which is not supported; use the checkpoint that it was converted from"
            )
        _KEYS.check(fields)

        def optional(key: str, minimum: int) -> int | None:
            return None if fields.values.get(key) is None else fields.integer(key, minimum=minimum)

        tied = fields.values.get("medusa_tied_projection")
        return cls(
            optional("medusa_num_heads", 1),
            optional("medusa_num_layers", 0),
            fields.text("base_model_name_or_path", ""),
            None if tied is None else fields.flag("medusa_tied_projection", False),
        )


_LOSS_TARGETS = ("target", "text")


@dataclass(frozen=True, slots=True)
class MedusaTraining(TrainingOptions):
    """Options for training Medusa heads, in addition to those of every training.

    loss_vocab_size  tied heads: number of the target's ids in the losses, the most frequent in the sequences; positions
                     with other tokens are skipped; 0 = all. Matmuls with the output layer are nearly all of a step's
                     work. The heads draft among all ids either way
    """

    epochs: float = option(1.0, "Number of passes over all sequences.")
    loss_target: str = option(
        "target", "Loss target: target (the target's distribution) or text (the tokens of the sequence)."
    )
    loss_vocab_size: int = option(
        0, "Number of most frequent ids that the losses see, to train faster; 0 uses all of them."
    )
    seed: int = option(0, "Seed of the order of the sequences.")

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if self.loss_target not in _LOSS_TARGETS:
            raise ConfigurationError(
                f"loss_target: expected one of {', '.join(_LOSS_TARGETS)}, got {self.loss_target!r}; use one of them"
            )
        if not 0 < self.epochs < math.inf:
            raise ConfigurationError(f"epochs: expected a positive number, got {self.epochs}; correct it")
        if self.loss_vocab_size < 0:
            raise ConfigurationError(
                f"loss_vocab_size: expected a number of ids of at least 0, got {self.loss_vocab_size}; give 0 for "
                "all ids"
            )


@dataclass(frozen=True, slots=True)
class MedusaTexts(TextOptions):
    """Data for training and measuring heads."""

    tokens: int = option(300_000, "Number of tokens of the data to train on.")
    self_distill_tokens: int = option(0, "Number of tokens of the target's own continuations to train on.")
    temperature: tuple[float, ...] = option(
        (0.0, 1.0), "Temperature of these continuations; repeatable, used in turns. Default: 0 and 1."
    )

    def __post_init__(self) -> None:
        TextOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if min(self.tokens, self.self_distill_tokens) < 0 or self.tokens + self.self_distill_tokens < self.length:
            raise ConfigurationError(
                "tokens: expected at least one sequence to train on, got none; raise tokens or self_distill_tokens"
            )
        if not self.temperature or not all(0 <= value < math.inf for value in self.temperature):
            raise ConfigurationError(
                "temperature: expected 0 (greedy) or more, once or several times, got "
                f"{list(self.temperature)}; correct it"
            )

    def check_data(self, *, marked: bool) -> None:
        """Raise ConfigurationError if continuations are asked for of data whose answers are ``marked``."""
        if marked and self.self_distill_tokens:
            raise ConfigurationError(
                "self_distill_tokens: expected 0 for chats, traces and hidden states, whose answers are learnt, got "
                f"{self.self_distill_tokens}; set it to 0, or give text"
            )
