"""Integers as a device computes them whose arithmetic is float32: exact below 2**24 and rounded above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})


class IntegersThroughFloat32(TorchDispatchMode):
    """Rounds every integer that goes into an operation, and every one that comes out, to float32.

    ``largest`` is the largest magnitude that was seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            return func(*args, **(kwargs or {}))  # a view, or what writes into its argument, moves numbers only
        return tree_map(self._rounded, func(*tree_map(self._rounded, args), **tree_map(self._rounded, kwargs or {})))

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in _INTEGERS or not x.numel():
            return x
        self.largest = max(self.largest, int(x.to(torch.int64).abs().max()))
        return x.to(torch.float32).to(torch.int64).to(x.dtype)
