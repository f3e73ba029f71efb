"""Settings of rotary position embedding, and how long a text they serve. Not here: tables and the rotation
(`paceline.decoder.models.rope`).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigurationError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of every rope type; a type reads those it knows and leaves the others.

    ``factor`` None means ``max_position_embeddings / original_max_position_embeddings`` (yarn and longrope
    only).
    """

    type: str = "default"
    theta: float = 10000.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    factor: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def longest(self) -> int | None:
        """How many positions a fixed table serves; None: any number."""
        return {
            "dynamic": self.max_position_embeddings,
            "longrope": self.original_max_position_embeddings,
        }.get(self.type)


def check_positions(config: RopeConfig, positions: int) -> None:
    """Raise ConfigurationError where a text of so many positions needs frequencies that follow its length."""
    if config.longest is not None and positions > config.longest:
        raise ConfigurationError(
            f"n_positions={positions} is more than the {config.longest} up to which rope type {config.type!r} has one "
            "set of frequencies; beyond, it chooses by the length of the text at every token, and a compiled decoder's "
            f"table is fixed. Load the decoder with n_positions={config.longest} or fewer"
        )
