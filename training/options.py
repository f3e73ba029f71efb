"""The options that every training of heads has. Not here: what only Medusa or only EAGLE knows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from paceline.core.errors import ConfigurationError
from paceline.training.frozen_model import check_device, products


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How heads are trained.

    batch_size     texts in a step
    learning_rate  the largest; it rises over the first steps and falls along a cosine
    precision      of matrix products, "f32" or "bf16"
    device         of PyTorch where heads learn: "cpu", "cuda" or "cuda:N"
    max_minutes    stop after so long, to resume later; None = run to the end

    Raises:
        ConfigurationError: a value is out of range.
    """

    batch_size: int = field(default=8, metadata={"help": "Texts in a step."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Largest learning rate."})
    precision: str = field(
        default="f32",
        metadata={"help": "Of matrix products: f32, or bf16, which is faster on a CPU with instructions for it."},
    )
    device: str = field(default="cpu", metadata={"help": "Where heads learn: cpu, cuda or cuda:N."})
    max_minutes: float | None = field(default=None, metadata={"help": "Stop after so long; run again to resume."})

    def __post_init__(self) -> None:
        products(self.precision)
        check_device(self.device)
        if self.batch_size < 1 or not 0 < self.learning_rate < math.inf:
            raise ConfigurationError("batch_size and learning_rate of a training must be positive")
        if self.max_minutes is not None and not self.max_minutes >= 0:
            raise ConfigurationError(
                f"max_minutes={self.max_minutes} is not a time; give 0 or more, or None to train to the end"
            )

    def resume_key(self) -> dict[str, object]:
        """What must be the same when a run is resumed. It may go on with another device."""
        return {name: value for name, value in asdict(self).items() if name not in {"max_minutes", "device"}}
