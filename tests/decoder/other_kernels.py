"""The kernels, compiled as for a processor that has fewer instructions; no tests."""

from __future__ import annotations

import ctypes

from paceline.decoder import environment
from paceline.decoder.native import build


def kernels(*flags: str) -> ctypes.CDLL:
    """Built with these flags too, as fast as they can be built, and kept in the cache."""
    (path,) = build._build([build.NATIVE.with_flags("-O0", *flags)], environment.cache_root() / "native")
    return ctypes.CDLL(str(path))
