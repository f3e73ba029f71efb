"""Metadata of a GGUF file under the key prefix of its architecture, and the divisors of rotations that it has."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.decoder.gguf.header import GgufHeader
from paceline.decoder.json_fields import Fields

FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of rotary frequencies [rotated / 2]: Llama 3.1's scaling, and longrope's for short and for long texts."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Metadata under the key prefix of an architecture."""

    header: GgufHeader
    prefix: str
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Those of `FACTORS` that the file has, where they are read."""
    asked: set[str] = field(default_factory=set)
    """The keys that were asked for."""

    def _name(self, key: str) -> str:
        self.asked.add(key)
        return f"{self.prefix}.{key}"

    @property
    def fields(self) -> Fields:
        return self.header.fields

    def integer(self, key: str, default: int | None = None) -> int:
        """A number above 0; of one for each layer, the largest: tensors show whether layers differ."""
        values = self.get(key)
        if isinstance(values, list) and values and all(isinstance(one, int) and one > 0 for one in values):
            return int(max(values))
        return self.fields.integer(self._name(key), default)

    def whole(self, key: str) -> int:
        """Return a non-negative integer; 0 if the key is absent."""
        return self.fields.integer(self._name(key), 0, minimum=0)

    def unless_zero(self, key: str, default: float | None) -> float | None:
        """A number, or the default where it is missing or 0, as llama.cpp has it for some."""
        return self.number(key) if self.get(key) else default

    def number(self, key: str, default: float | None = None) -> float:
        return _decimal(self.fields.number(self._name(key), default))

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(self._name(key), default)

    def get(self, key: str) -> object:
        """The value as it is; None: there is none."""
        return self.header.metadata.get(self._name(key))

    def each(self, key: str) -> list[int]:
        """A number above 0 for each layer, from the file's one for all or one for each."""
        said, most, count = self.get(key), self.integer(key), self.integer("block_count")
        return said if isinstance(said, list) and len(said) == count else [most] * count

    def holds(self, tensor: str) -> bool:
        """Whether the file has a tensor of that name."""
        return tensor in self.header.tensors

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", max(1, self.integer("embedding_length") // self.heads))

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def key_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.heads)


_LARGEST = 3.4e38  # what a float32 holds


def _decimal(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for 9.999999747378752e-06."""
    if value > _LARGEST:
        return value
    rounded = struct.pack("<f", value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shorter if short <= _LARGEST and struct.pack("<f", short) == rounded), value)
