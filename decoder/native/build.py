"""Builds the native kernels once per machine and loads them.

Not a build system: one compiler call, one shared library in the artefact cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

from paceline.core import noise
from paceline.core.errors import BackendError
from paceline.decoder import artefacts, environment

_SOURCE = Path(__file__).with_name("kernels.cpp")
# -ffp-contract=off: noise must equal its PyTorch form bit for bit; fused multiply-adds are asked for by name.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")


def library_facts() -> dict[str, object]:
    """What the built library depends on."""
    files = [*sorted(_SOURCE.parent.glob("*.h")), _SOURCE]
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"kind": "native kernels", "source": source, "flags": list(_FLAGS), **artefacts.machine_facts()}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernels, with global symbols so that compiled graphs find them.

    Raises:
        BackendError: no compiler, or the build failed.
    """
    folder = artefacts.ensure(environment.cache_root() / "native", library_facts(), _build)
    loaded = ctypes.CDLL(str(folder / "kernels.so"), mode=ctypes.RTLD_GLOBAL)
    loaded.paceline_set_noise_table(_noise_table())
    return loaded


@lru_cache(maxsize=1)
def _noise_table() -> ctypes.Array[ctypes.c_int32]:
    """Kept for the life of the process: the library points into it."""
    table = noise.log_table()
    return (ctypes.c_int32 * len(table))(*table)


def require_compiler() -> str:
    """The C++ compiler's path, or a BackendError that says how to get one."""
    found = shutil.which(environment.compiler())
    if found is None:
        raise BackendError(
            f"the inductor backend needs a C++ compiler and {environment.compiler()!r} is not on PATH; install g++ "
            "(Debian, Ubuntu: apt install g++), set CXX, or use backend='eager'"
        )
    return found


def _build(folder: Path) -> None:
    lib = Path(torch.__file__).parent / "lib"
    link = ["-L", str(lib), "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
    command = [require_compiler(), *_FLAGS, str(_SOURCE), "-o", str(folder / "kernels.so"), *link]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"building the native kernels failed: {' '.join(command)}\n{done.stderr[-2000:]}")
