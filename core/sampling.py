"""Sampling parameters of one request as a checked value, and a batch of them as tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from paceline.core.errors import ConfigurationError, SamplingError
from paceline.core.types import SamplingKind, SamplingTensors

if TYPE_CHECKING:
    from torch import Tensor

TOP_K_LIMIT = 256
"""The largest top-k of the sampling mode "top-k", whose graphs choose only among that many ids."""

SAMPLING_KINDS: tuple[SamplingKind, ...] = get_args(SamplingKind)
"""All sampling modes, from the narrowest to the widest."""

COMPILED_KINDS: tuple[SamplingKind, ...] = ("greedy", "top-k", "full")
"""Sampling modes that rounds have graphs for by default. A top-k above the limit is rare."""

_MAX_EXACT_FLOAT = 1 << 24  # top-k travels in a float32 tensor; no vocabulary is that large
_LEAST_TEMPERATURE = 1e-20
"""Minimum above 0. Logits divided by less exceed `reduce.NEGATIVE`, which marks cut ids, and float32."""
_MOST_TEMPERATURE = 1e20
"""Maximum. Logits divided by more come near `reduce.NEGATIVE`, and banned ids would be sampled."""
_WORD = (1 << 64) - 1
_LEAST_TOP_P = 1e-30
"""Minimum. A smaller value is 0 in float32, at least on a device without subnormals, and then contains no token."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request. ``temperature == 0`` is greedy decoding: of equal logits at the top the lowest id.

    ``top_k == 1`` is not the same: equal logits at the border of top-k are all kept, so any of the equal largest ones
    may be sampled. SamplingError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        heat, least = self.temperature, _LEAST_TEMPERATURE
        for param, valid, expected, advice in (
            ("temperature", 0 <= heat < math.inf, "a finite number of at least 0", "0 is greedy"),
            (
                "temperature",
                not 0 < heat < least,
                f"0 or at least {least}, the least that float32 logits can be divided by",
                "use 0 for greedy decoding",
            ),
            (
                "temperature",
                heat <= _MOST_TEMPERATURE,
                f"at most {_MOST_TEMPERATURE}, above which banned tokens could be sampled",
                "lower it, since all tokens are equally likely long before that",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or a positive integer", "correct it"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1", "1 switches it off"),
            (
                "top_p",
                self.top_p >= _LEAST_TOP_P,
                f"at least {_LEAST_TOP_P}, the least that float32 distinguishes from 0",
                "use temperature=0 for greedy decoding",
            ),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1", "0 switches it off"),
            ("seed", -(1 << 63) <= self.seed < 1 << 64, "an integer of at most 64 bits", "give a smaller one"),
        ):
            if not valid:
                raise SamplingError(f"{param}: expected {expected}, got {getattr(self, param)}; {advice}", param=param)


def param_row(sampling: Sampling) -> list[float]:
    return [sampling.temperature, float(min(sampling.top_k, _MAX_EXACT_FLOAT)), sampling.top_p, sampling.min_p]


IDLE_ROW = (-1.0, 0.0, 1.0, 0.0)
"""The row of `SamplingTensors.params` of a slot without a request: greedy, the cheapest mode, if it is computed at
all.
"""


def seed_row(seed: int) -> list[int]:
    """Return the row of `SamplingTensors.seeds` of one request: the mixed seed in 16-bit words, the lowest first."""
    mixed = _mix(seed)
    return [mixed >> shift & 0xFFFF for shift in (0, 16, 32, 48)]


def row_seed(seed: int, row: int) -> int:
    """Return the seed of a row of a call: the call's seed for row 0, else a hash of the seed and the row.

    So the first row of a batch equals a single prompt, and calls with seeds 0, 1, 2 and so on share no rows.
    """
    return seed if row == 0 else _mix(_mix(seed) + row)


def sampling_tensors(requests: Sequence[Sampling]) -> SamplingTensors:
    import torch

    params: Tensor = torch.tensor([param_row(r) for r in requests], dtype=torch.float32)
    seeds: Tensor = torch.tensor([seed_row(r.seed) for r in requests], dtype=torch.int32)
    return SamplingTensors(params, seeds, widest(kind_of(one.temperature, one.top_k) for one in requests))


def kind_of(temperature: float, top_k: float) -> SamplingKind:
    """Return the narrowest sampling mode that gives a request with these values its tokens."""
    if temperature <= 0:
        return "greedy"
    if top_k == 0 or top_k >= _MAX_EXACT_FLOAT:  # no vocabulary is that large, so nothing is cut
        return "full"
    return "top-k" if top_k <= TOP_K_LIMIT else "wide"


def widest(kinds: Iterable[SamplingKind]) -> SamplingKind:
    """Return the narrowest sampling mode that serves requests of all these modes; greedy, if there are none."""
    return max(kinds, key=SAMPLING_KINDS.index, default="greedy")


def known_kinds(names: Sequence[str]) -> tuple[SamplingKind, ...]:
    """Return the sampling modes of these names, from the narrowest to the widest."""
    if not names or any(name not in SAMPLING_KINDS for name in names):
        raise ConfigurationError(
            f"sampling: expected one or more of {', '.join(SAMPLING_KINDS)}, got {', '.join(names) or 'none'}; "
            "correct it"
        )
    return tuple(kind for kind in SAMPLING_KINDS if kind in names)


def kind_of_params(params: Tensor) -> SamplingKind:
    """Return the sampling mode of a batch from its ``params`` [B, 4], for tensors of another process."""
    return widest(kind_of(temperature, top_k) for temperature, top_k, *_ in params.tolist())


def _mix(x: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, 2014), a permutation of 64-bit words."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31
