"""Builds the native libraries once per machine and loads them.

Not a build system: one compiler call and one shared library in the artefact cache for each.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from paceline.core.errors import BackendError
from paceline.decoder import environment
from paceline.decoder.compile import cache

_SOURCE = Path(__file__).with_name("kernels.cpp")
_ROUNDS = Path(__file__).with_name("rounds.cpp")
_TORCH = Path(torch.__file__).parent
# -ffp-contract=off: noise must equal its PyTorch form bit for bit; fused multiply-adds are asked for by name.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")


# PyTorch's headers ask for C++20; its library has what they declare.
_ROUNDS_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC")


def library_facts() -> dict[str, object]:
    """What the built library depends on."""
    return _facts("native kernels", [*sorted(_SOURCE.parent.glob("*.h")), _SOURCE], _FLAGS)


def _facts(kind: str, files: Sequence[Path], flags: Sequence[str]) -> dict[str, object]:
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"kind": kind, "source": source, "flags": list(flags), **cache.machine_facts()}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernels, with global symbols so that compiled graphs find them.

    Raises:
        BackendError: no compiler, or the build failed.
    """
    folder = cache.ensure(environment.cache_root() / "native", library_facts(), _build)
    return ctypes.CDLL(str(folder / "kernels.so"), mode=ctypes.RTLD_GLOBAL)


def require_compiler() -> str:
    """The C++ compiler's path, or a BackendError that says how to get one."""
    compiler = shutil.which(environment.compiler())
    if compiler is None:
        raise BackendError(
            f"the inductor backend needs a C++ compiler and {environment.compiler()!r} is not on PATH; install g++ "
            "(Debian, Ubuntu: apt install g++), set CXX, or use backend='eager'"
        )
    return compiler


def _build(folder: Path) -> None:
    _compile(_SOURCE, _FLAGS, folder / "kernels.so")


@lru_cache(maxsize=1)
def rounds_library() -> ctypes.CDLL:
    """What runs a compiled graph several times.

    Raises:
        BackendError: no compiler, or the build failed.
    """
    flags = [*_ROUNDS_FLAGS, "-I", str(_TORCH / "include")]

    def build(folder: Path) -> None:
        _compile(_ROUNDS, flags, folder / "rounds.so")

    folder = cache.ensure(environment.cache_root() / "native", _facts("rounds", [_ROUNDS], flags), build)
    loaded = ctypes.CDLL(str(folder / "rounds.so"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.paceline_open.argtypes = [pointer, pointer, pointer, number, pointer, pointer, number]
    loaded.paceline_again.argtypes = loaded.paceline_close.argtypes = [pointer]
    loaded.paceline_open.restype = loaded.paceline_again.restype = number
    return loaded


def _compile(source: Path, flags: Sequence[str], output: Path) -> None:
    lib = _TORCH / "lib"
    link = ["-L", str(lib), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    command = [require_compiler(), *flags, str(source), "-o", str(output), *link]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"building {source.name} failed: {' '.join(command)}\n{done.stderr[-2000:]}")
