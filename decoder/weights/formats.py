"""The formats of quantised weight matrices and of narrow caches, by name. Nothing is computed with tensors, so that
options are checked without PyTorch; `paceline.decoder.weights.quantize` makes the matrices.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

GROUP = 32
"""Numbers of a block."""

E4M3_LARGEST = 240.0
"""The largest number of fp8_e4m3 that means the same everywhere, and the one that rows are scaled to.

A byte up to it is one number in the type of PyTorch, which goes on to 448, and in that of Neuron's chips before
Trainium3, whose bytes behind it are infinity and NaN as in IEEE 754. Scaled to it a row has 14 powers of
two of full precision, where 448 would leave 14.8.
"""


class WeightFormat(Enum):
    """A format of quantised matrices. The value is its name in options; ``code`` is its number in native kernels."""

    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"

    @property
    def code(self) -> int:
        """Number of this format in `Format` of decoder/native/matrix.h."""
        return {"int8": 3, "fp8_e4m3": 7, "q8_0": 4, "q4_0": 5, "q4_1": 6}[self.value]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of 32 numbers; 0 where there are no blocks."""
        return {"q8_0": 34, "q4_0": 18, "q4_1": 20}.get(self.value, 0)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor that contains the numbers: that of a number, or bytes of blocks."""
        import torch

        return {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}.get(self.value, torch.uint8)

    @property
    def largest(self) -> float:
        """The number that the largest of a row becomes, where rows have scales."""
        return E4M3_LARGEST if self is WeightFormat.FP8_E4M3 else 127.0

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of ``columns`` numbers, without its scale."""
        return columns // GROUP * self.block_bytes if self.block_bytes else columns

    @classmethod
    def of(cls, name: str) -> WeightFormat:
        try:
            return cls(name)
        except ValueError:
            better = {"int8_per_tensor": "int8", "fp8_e5m2": "fp8_e4m3"}.get(name)  # former formats
            raise ConfigurationError(
                f"quantization: expected one of {', '.join(item.value for item in cls)}, or gguf to keep the "
                f"formats of a GGUF file, got {name!r}; use "
                + ("one of them" if better is None else f"{better!r}, which has as many bytes and is more exact")
            ) from None


CACHE_FORMATS = (WeightFormat.INT8, WeightFormat.FP8_E4M3)
"""Those of keys and values of 8 bits (``kv_cache_dtype``)."""

SCALE_BYTES = 4
"""Behind the numbers of a row of such a cache: the scale that they share, float32."""
