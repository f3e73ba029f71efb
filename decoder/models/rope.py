"""Rotary position embedding: its tables for a fixed number of positions.

A compiled decoder rotates keys once, when they enter the cache, and all graphs of a model use one table. In Hugging
Face's code the frequencies of two types depend on the length of the sequence; with a fixed table:

- ``dynamic`` equals ``default`` up to ``max_position_embeddings``; longer sequences are rejected.
- ``longrope`` has one set of factors up to ``original_max_position_embeddings`` and one beyond. A sequence that grows
past the border would hold keys of both sets, so longer ones are rejected, and ``long_factor`` is never used.
"""

import math

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError, UnknownArchitectureError
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.models.config import ROPE_TYPES, RopeConfig, check_positions


def rope_tables(config: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each float32 [positions, head_dim]: the head_dim / 2 angles twice, as `apply_rope` reads
    them, multiplied by the type's attention scaling.
    """
    if positions < 1 or head_dim < 2 or head_dim % 2:
        raise ConfigurationError(
            f"n_positions: rope tables need at least one position and an even head size, got {positions} and "
            f"head_dim={head_dim}; correct the decoder's length or the model's head_dim"
        )
    check_positions(config, positions)
    frequencies = _frequencies(config, head_dim)
    places = torch.arange(positions, dtype=torch.float32, device="cpu")
    angles = places[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    scale = _attention_scaling(config)
    return angles.cos() * scale, angles.sin() * scale


def rotation_at(at: Tensor, cos: Tensor, sin: Tensor, *, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """The tables' rows at positions [b, T] int32, each [b, T, 1, D]."""
    return kernels.embed(cos, at).unsqueeze(2), kernels.embed(sin, at).unsqueeze(2)


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2]."""
    # The order of operations in this file follows Hugging Face's, so that float32 tables are bitwise identical.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    wavelengths = config.theta**exponents
    if config.type in ("default", "dynamic"):
        return 1.0 / wavelengths
    if config.type == "proportional":
        rotated_share = int(config.share * head_dim // 2)
        return torch.cat((1.0 / wavelengths[:rotated_share], torch.zeros(head_dim // 2 - rotated_share))) / (
            config.factor or 1.0
        )
    if config.type == "linear":
        return 1.0 / wavelengths / _factor(config)
    if config.type == "llama3":
        return _llama3(config, 1.0 / wavelengths)
    if config.type == "yarn":
        return _yarn(config, wavelengths)
    if config.type == "longrope":
        return 1.0 / (_longrope_factors(config, head_dim) * wavelengths)
    raise UnknownArchitectureError(
        f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {config.type!r}; use a supported model"
    )


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    """Long waves stretched by the factor, short ones kept, those in between interpolated; [head_dim / 2]."""
    factor = _factor(config)
    original = config.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    longest_kept = original / config.high_freq_factor
    shortest_stretched = original / config.low_freq_factor
    kept_share = (original / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    between = (1 - kept_share) * inverse / factor + kept_share * inverse
    result = torch.where(wavelength > shortest_stretched, inverse / factor, between)
    return torch.where(wavelength < longest_kept, inverse, result)


def _yarn(config: RopeConfig, wavelengths: Tensor) -> Tensor:
    """A ramp over the dimensions from kept frequencies to stretched ones; [head_dim / 2]."""
    half = wavelengths.shape[0]
    low = _dimension_turning(config, config.beta_fast, 2 * half)
    high = _dimension_turning(config, config.beta_slow, 2 * half)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(half, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept_share = 1 - ramp
    return 1.0 / (_factor(config) * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share


def _dimension_turning(config: RopeConfig, turns: float, head_dim: int) -> float:
    """The (fractional) dimension whose angle makes ``turns`` full turns within the original length."""
    original = config.original_max_position_embeddings
    return (head_dim * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(config.theta))


def _longrope_factors(config: RopeConfig, head_dim: int) -> Tensor:
    """One divisor per frequency, [head_dim / 2]: those of short texts."""
    factors = config.short_factor
    if len(factors) != head_dim // 2:
        raise UnknownArchitectureError(
            f"short_factor: expected {head_dim // 2} entries for rope type 'longrope', got {len(factors)}; correct "
            "the checkpoint's config.json"
        )
    return torch.tensor(factors, dtype=torch.float32, device="cpu")


def _factor(config: RopeConfig) -> float:
    if config.factor is not None:
        return config.factor
    return config.max_position_embeddings / config.original_max_position_embeddings


def _attention_scaling(config: RopeConfig) -> float:
    """Return the factor of cos and sin that keeps attention as sharp over a stretched context."""
    if config.type not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    factor = _factor(config)
    if config.type == "longrope":
        original = config.original_max_position_embeddings
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(factor, config.mscale) / _yarn_scale(factor, config.mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
