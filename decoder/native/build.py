"""The native libraries of this machine: shipped with the package, or built once and kept in the cache.

A wheel may contain kernels for several kinds of processors (added by ``setup.py``). If none fits, and in a checkout,
they are compiled for this processor. The library that runs recorded steps also depends on the version of PyTorch. Other
processes wait while one builds. If the cache is not writable, each process builds its own copy.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic

import torch

from paceline.core.errors import BackendError, StorageError
from paceline.decoder import environment
from paceline.decoder.compile import cache
from paceline.decoder.native import compiler
from paceline.decoder.native.compiler import KERNELS, Library

NATIVE = KERNELS.with_flags("-march=native")
_PROGRAM = compiler.program(Path(torch.__file__).parent)
_ALONE = threading.Lock()
_ROOM = 1 << 20  # bytes that a file of a build may need


def library() -> ctypes.CDLL:
    """Return the library of kernels; raise BackendError if none fits and none can be built."""
    return _libraries()[0]


def program_library() -> ctypes.CDLL:
    """Return the library that runs recorded steps, with PyTorch's operators ``paceline::...`` and
    ``paceline_program::...``.
    """
    return _libraries()[1]


def build_both() -> None:
    """Build the missing libraries; raise BackendError without a compiler that works."""
    _libraries()


def require_compiler() -> str:
    """Return the C++ compiler's path; raise a BackendError that explains how to install one if it is absent."""
    found = shutil.which(environment.compiler())
    if found is None:
        raise BackendError(
            f"backend='native': expected kernels built for this processor and PyTorch {torch.__version__}, or the "
            f"C++ compiler {environment.compiler()!r} on PATH, got neither; install g++ (Debian, Ubuntu: apt "
            "install g++), set CXX, or use backend='eager'"
        )
    return found


def facts(built: Library) -> dict[str, object]:
    """Return the facts on which a local build depends."""
    machine = cache.machine_facts()
    if built.name == KERNELS.name:
        del machine["torch"]
    return {"kind": built.name, "source": built.source_hash(), "flags": list(built.flags), **machine}


def origin() -> str:
    """Return the origin of this machine's libraries, for messages; raise BackendError if there are none."""
    if (kernels := prebuilt(compiler.cpu_flags())) and _prebuilt_programs():
        return f"{kernels[0].stem} came with the package"
    require_compiler()
    return f"C++ compiler {environment.compiler()}"


def prebuilt(flags: frozenset[str]) -> list[Path]:
    """Return prebuilt kernels that a processor with these flags can run, the fastest first."""
    paths = [compiler.PREBUILT / f"kernels-{one.name}.so" for one in compiler.fitting(flags)]
    return [path for path in paths if path.is_file()]


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    with _ALONE:
        return _loaded()


@lru_cache(maxsize=1)
def _loaded() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    kernels, program = load([(NATIVE, prebuilt(compiler.cpu_flags())), (_PROGRAM, _prebuilt_programs())])
    program.paceline_again.argtypes, program.paceline_again.restype = [ctypes.c_void_p], ctypes.c_int64
    program.paceline_close.argtypes, program.paceline_close.restype = [ctypes.c_int64], None
    return kernels, program


def _prebuilt_programs() -> list[Path]:
    path = compiler.PREBUILT / f"program-{torch.__version__}.so"
    return [path] if path.is_file() else []


def load(wanted: Sequence[tuple[Library, Sequence[Path]]]) -> list[ctypes.CDLL]:
    """Load libraries, each with symbols for those after it: the first file that this system can load, else a local
    build.
    """
    missing = [library for library, ready in wanted if not ready]
    with ExitStack() as stack:
        root = environment.cache_root() / "native"
        try:
            _build(missing, root)
        except StorageError as error:
            _say(f"{error}. Building kernels for this process alone.")
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline.")))
            _build(missing, root)
        return [_open(library, ready, root) for library, ready in wanted]


def _open(library: Library, ready: Sequence[Path], root: Path) -> ctypes.CDLL:
    for path in ready:
        with suppress(OSError):  # it may need a newer C library
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    for last in (False, True):
        path = _build([library], root)[0]
        try:
            if not _is_whole(path):
                raise OSError("it is cut off")
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as error:
            if last:
                raise BackendError(
                    f"{path}: the kernels cannot be loaded ({error}); set PACELINE_CACHE to another folder, or use "
                    "backend='eager'"
                ) from error
            _say(f"{path} is damaged ({error}): building it again")
            shutil.rmtree(path.parent, ignore_errors=True)
    raise AssertionError


def _is_whole(path: Path) -> bool:
    """Whether an ELF file ends where its headers say: loading a truncated one would crash the process on Linux."""
    with path.open("rb") as file:
        head = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if head[:4] != b"\x7fELF":
        return True
    offset, each, count = struct.unpack_from("<Q", head, 40) + struct.unpack_from("<HH", head, 58)
    return bool(size >= offset + each * count)


def _build(libraries: Sequence[Library], root: Path) -> list[Path]:
    every = [facts(library) for library in libraries]
    with ExitStack() as stack:
        drafts = {
            library: stack.enter_context(cache.making(root, each, waiting=_waiting))
            for library, each in zip(libraries, every, strict=True)
        }
        files = {draft / f"{one.name}.so": one for one, draft in drafts.items() if draft is not None}
        if files:
            _compile(files)
    return [root / cache.key(each) / f"{one.name}.so" for one, each in zip(libraries, every, strict=True)]


def _compile(files: dict[Path, Library]) -> None:
    cores = environment.cores()
    progress = _Progress(sum(len(one.sources) for one in files.values()))
    try:
        compiler.compile_libraries(files, require_compiler(), cores=cores, report=progress)
    except BackendError:
        for path in files:  # check for a full disk
            path.write_bytes(bytes(_ROOM))
        raise
    finally:
        progress.end()
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())  # else a crash of the machine could leave a partial file under its name


def _waiting() -> None:
    _say("Another process builds the kernels. Waiting for it.")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


class _Progress:
    def __init__(self, files: int) -> None:
        self._files, self._begin = files, monotonic()
        self._changes = sys.stderr.isatty() and sys.stderr is sys.__stderr__  # not if another library redirects it
        self._show(0, "")

    def __call__(self, files: int, share: float) -> None:
        if self._changes:
            self._show(files, f", about {(monotonic() - self._begin) * (1 / share - 1):.0f} s left")

    def _show(self, files: int, left: str) -> None:
        text = f"Building kernels for this CPU: {files} of {self._files} files{left}"
        sys.stderr.write(f"\r{text}\x1b[K" if self._changes else f"{text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._changes:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
