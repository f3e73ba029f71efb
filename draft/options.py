"""Options of drafters in modules that load PyTorch, for lists and checks that do not."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape
from paceline.decoder.models.config import ModelConfig
from paceline.heads.options import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """A drafter without options but k."""


def layerskip_shape(target: ModelConfig, wanted: Wanted, *, layers: int | None = None) -> DraftShape:
    """Check the option of LayerSkip; return the shape of its drafts.

    layers  how many of the target's layers draft, from the first on; None: a quarter of them

    Raises:
        ConfigurationError: there are not that many layers.
    """
    asked = first_layers(target) if layers is None else layers
    if not 1 <= asked < target.num_layers:
        raise ConfigurationError(
            f"layers: expected 1 to {target.num_layers - 1}, fewer than the target's {target.num_layers}, got "
            f"{asked}; correct it, or use another drafter"
        )
    return DraftShape.chain(wanted.k)


def first_layers(target: ModelConfig) -> int:
    """Return how many layers draft if nothing else is asked for."""
    return max(1, target.num_layers // 4)
