"""Options of Medusa heads: of a draft, of their training, and of the texts that they learn from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.medusa.config import MedusaConfig
from paceline.training.options import TextOptions, TrainingOptions

LOSS_TARGETS = ("target", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions:
    """Options of a draft; what they mean is said at `paceline.auto_drafter.AutoDrafter`."""

    draft_tree: object = None


@dataclass(frozen=True, slots=True)
class MedusaTraining(TrainingOptions):
    """How Medusa heads are trained; the other options are those of every training.

    epochs           passes over the kept windows
    loss_target      "target": the target's distribution; "text": the tokens that came
    loss_vocab_size  tied heads: the losses see so many of the target's ids, those that are most frequent in the texts,
                     and skip places whose token is none of them; 0 = all. The products with the output layer are
                     nearly all of a step's work. The heads draft among all ids either way
    seed             of the order of the windows

    Raises:
        ConfigurationError: a value is out of range.
    """

    epochs: float = field(default=1.0, metadata={"help": "Passes over all texts."})
    loss_target: str = field(
        default="target", metadata={"help": "What heads learn: target, its distribution; text, the tokens that came."}
    )
    loss_vocab_size: int = field(
        default=0, metadata={"help": "Ids that the losses see, the most frequent ones: faster; 0 = all of them."}
    )
    seed: int = field(default=0, metadata={"help": "Of the order of the texts."})

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if self.loss_target not in LOSS_TARGETS:
            raise ConfigurationError(
                f"loss_target={self.loss_target!r} is unknown; use one of {', '.join(LOSS_TARGETS)}"
            )
        if not 0 < self.epochs < math.inf:
            raise ConfigurationError(f"epochs={self.epochs} must be positive")
        if self.loss_vocab_size < 0:
            raise ConfigurationError(f"loss_vocab_size={self.loss_vocab_size} is no number of ids; 0 means all")


@dataclass(frozen=True, slots=True)
class MedusaTexts(TextOptions):
    """What heads are trained and measured on.

    tokens               of the data, as they are
    self_distill_tokens  of the target's own continuations of the data
    temperature          at which it writes them, by turns; 0 is greedy

    Raises:
        ConfigurationError: a number is out of range.
    """

    tokens: int = field(default=300_000, metadata={"help": "Tokens of the data to train on."})
    self_distill_tokens: int = field(
        default=0, metadata={"help": "Tokens of the target's own continuations to train on."}
    )
    temperature: tuple[float, ...] = field(
        default=(0.0, 1.0), metadata={"help": "Of those, by turns; repeatable. Default: 0 and 1."}
    )

    def __post_init__(self) -> None:
        TextOptions.__post_init__(self)  # `super()` does not work in a slotted dataclass
        if min(self.tokens, self.self_distill_tokens) < 0 or self.tokens + self.self_distill_tokens < self.length:
            raise ConfigurationError("train on at least one text: raise tokens or self_distill_tokens")
        if not self.temperature or not all(0 <= value < math.inf for value in self.temperature):
            raise ConfigurationError("temperature must be 0 (greedy) or more, once or several times")

    def check(self, config: MedusaConfig, sizes: ModelConfig) -> None:
        """Raise ConfigurationError unless such heads can be trained and measured on such texts of this target."""
        if not self.prompt_length + config.heads < self.length <= sizes.max_position_embeddings:
            raise ConfigurationError(
                f"texts of {self.length} tokens do not fit: the target reads {sizes.max_position_embeddings}, and "
                f"after a prompt of {self.prompt_length} there must be room for what {config.heads} heads predict"
            )
