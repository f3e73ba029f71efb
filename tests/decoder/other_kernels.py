"""The kernels, compiled as for a processor that has fewer instructions; no tests in here."""

from __future__ import annotations

import ctypes
from pathlib import Path

from paceline.decoder import environment
from paceline.decoder.native import build, compiler


def kernels(folder: Path, *flags: str) -> ctypes.CDLL:
    """Built in a folder with these flags too, as fast as they can be built."""
    path = folder / "kernels.so"
    library = build.NATIVE.with_flags("-O0", *flags)
    compiler.compile_libraries({path: library}, build.require_compiler(), environment.cores(), lambda *_: None)
    return ctypes.CDLL(str(path))
