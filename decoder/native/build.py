"""Builds the native libraries once per machine and loads them.

Not a build system: the kernels are a few files that are compiled side by side, as many as there are cores, and linked;
the other library is one file. Each is one artefact in the cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from paceline.core.errors import BackendError
from paceline.decoder import environment
from paceline.decoder.compile import cache

_HERE = Path(__file__).parent
_KERNELS = ("attention_narrow.cpp", "attention.cpp", "products.cpp", "kernels.cpp", "experts.cpp", "rows.cpp")
"""What takes longest comes first."""
_PROGRAM = _HERE / "program.cpp"
_TORCH = Path(torch.__file__).parent
# -ffp-contract=off: noise must equal its PyTorch form bit for bit; fused multiply-adds are asked for by name.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
# PyTorch's headers ask for C++20; its library has what they declare.
_PROGRAM_FLAGS = ("-O2", "-std=c++20", "-fopenmp", "-fPIC", "-I", str(_TORCH / "include"))


def library_facts() -> dict[str, object]:
    """What the built library depends on."""
    return _facts("native kernels", [*sorted(_HERE.glob("*.h")), *(_HERE / name for name in _KERNELS)], _FLAGS)


def _facts(kind: str, files: Sequence[Path], flags: Sequence[str]) -> dict[str, object]:
    source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return {"kind": kind, "source": source, "flags": list(flags), **cache.machine_facts()}


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernels, with global symbols so that `program.cpp` finds them.

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
            f"backend='native' builds its kernels with a C++ compiler, and {environment.compiler()!r} is not on PATH; "
            "install g++ (Debian, Ubuntu: apt install g++), set CXX, or use backend='eager'"
        )
    return compiler


def build_both() -> None:
    """Build both libraries at the same time where neither is there yet: each alone would leave cores idle at its end.

    Raises:
        BackendError: no compiler, or a build failed.
    """
    if library.cache_info().currsize:
        return
    with ThreadPoolExecutor(1) as pool:
        program = pool.submit(_program_folder)
        library()
        program.result()


@lru_cache(maxsize=1)
def program_library() -> ctypes.CDLL:
    """What runs recorded steps; it also defines PyTorch's operators ``paceline::...`` and ``paceline_program::...``.

    Raises:
        BackendError: no compiler, or the build failed.
    """
    library()  # whose functions the operators call
    loaded = ctypes.CDLL(str(_program_folder() / "program.so"))
    loaded.paceline_again.argtypes, loaded.paceline_again.restype = [ctypes.c_void_p], ctypes.c_int64
    return loaded


def _program_folder() -> Path:
    def build(folder: Path) -> None:
        _compile([_PROGRAM], folder / "program.so", _PROGRAM_FLAGS)

    return cache.ensure(environment.cache_root() / "native", _facts("program", [_PROGRAM], _PROGRAM_FLAGS), build)


def _build(folder: Path) -> None:
    _compile([_HERE / name for name in _KERNELS], folder / "kernels.so", _FLAGS)


def _compile(sources: Sequence[Path], output: Path, flags: Sequence[str]) -> None:
    """A shared library of these files."""
    compiler = require_compiler()

    def compiled(source: Path) -> Path:
        made = output.with_name(f"{source.stem}.o")
        _run([compiler, *flags, "-c", str(source), "-o", str(made)], source.name)
        return made

    with ThreadPoolExecutor(environment.cores()) as pool:
        objects = list(pool.map(compiled, sources))
    lib = _TORCH / "lib"
    link = ["-L", str(lib), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(output), *link], output.name)
    for made in objects:
        made.unlink()


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"building {what} failed: {' '.join(command)}\n{done.stderr[-2000:]}")
