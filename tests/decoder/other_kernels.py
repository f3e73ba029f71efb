"""Calls of native kernels, also of those compiled with fewer instructions, and numbers for them; no tests."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.decoder import environment
from paceline.decoder.native import build


def kernels(*flags: str) -> ctypes.CDLL:
    """Built with these flags too, as fast as they can be built, and kept in the cache."""
    (path,) = build._build([build.NATIVE.with_flags("-O0", *flags)], environment.cache_root() / "native")
    return ctypes.CDLL(str(path))


def call(library: ctypes.CDLL, name: str, *arguments: Tensor | float | None) -> None:
    """Call a kernel; tensors go as pointers."""
    getattr(library, name)(
        *(
            ctypes.c_int64(one)
            if isinstance(one, int)
            else ctypes.c_float(one)
            if isinstance(one, float)
            else ctypes.c_void_p(None if one is None else one.data_ptr())
            for one in arguments
        )
    )


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
