"""The persistent cache of compiled artefacts: folders named by a key, each complete or absent.

An artefact is built in a folder with a temporary name, gets a manifest, and is renamed, so that a failed or killed
build leaves nothing under the real name. A lock, which the system releases when its owner dies, keeps two processes
from building the same thing. Artefacts themselves are built elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ArtefactError
from paceline.decoder.weights.atomic_write import atomic_write

if TYPE_CHECKING:
    from torch import nn

MANIFEST = "manifest.json"
_CACHE_REMEDY = "make room, or set PACELINE_CACHE to a folder of yours"
Facts = Mapping[str, object]

_SOURCES = frozenset({".py", ".cpp", ".h"})
_WITHOUT_GRAPHS = frozenset(
    {"placement", "orchestrator", "cli", "checks", "engine", "experiments", "serving", "text", "workers"}
)
_KNOWN_PACKAGES = frozenset({"paceline", "torch", *sys.stdlib_module_names})


def key(facts: Facts) -> str:
    """Return a short name for everything on which an artefact depends."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def ensure(root: Path, facts: Facts, build: Callable[[Path], None], *, prefix: str = "") -> Path:
    """Return the folder of the artefact with these facts; if it does not exist, ``build(folder)`` makes it. Its name
    begins with ``prefix``; errors as `making`.
    """
    with making(root, facts, prefix=prefix) as draft:
        if draft is not None:
            build(draft)
    return root / f"{prefix}{key(facts)}"


@contextmanager
def making(
    root: Path, facts: Facts, *, prefix: str = "", waiting: Callable[[], None] = lambda: None
) -> Iterator[Path | None]:
    """Yield a folder in which to build the artefact with these facts: it enters the cache if the block does not raise.

    Yields None if it already exists. ``waiting`` is called while another process builds it. Raises StorageError if it
    cannot be written.
    """
    folder = root / f"{prefix}{key(facts)}"
    if (folder / MANIFEST).is_file():
        yield None
        return
    from filelock import FileLock, Timeout

    with atomic_write(root, _CACHE_REMEDY):
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{folder.name}.lock", mode=0o600)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            waiting()
            lock.acquire()
        try:
            if (folder / MANIFEST).is_file():
                yield None
                return
            for left in root.glob(f"{folder.name}.*/"):  # left by a killed process: the lock was free
                shutil.rmtree(left, ignore_errors=True)
            draft = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=root))
            try:
                yield draft
                (draft / MANIFEST).write_text(json.dumps(dict(facts), indent=1, sort_keys=True))
                shutil.rmtree(folder, ignore_errors=True)  # incomplete
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        finally:
            lock.release()


def find(root: Path, facts: Facts, *, prefix: str = "") -> Path | None:
    """Return the folder of the artefact with these facts, or None if it does not exist; ``prefix`` as in `ensure`."""
    folder = root / f"{prefix}{key(facts)}"
    return folder if (folder / MANIFEST).is_file() else None


def copy(folder: Path, to: Path) -> None:
    """Copy an artefact into another root, unless it already exists (as when a folder is saved into itself)."""
    target = to / folder.name
    if (target / MANIFEST).is_file():
        return
    try:
        to.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=to))
        try:
            shutil.copytree(folder, draft, dirs_exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # incomplete
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ArtefactError(
            f"{to}: cannot copy compiled graphs there ({error}); check the free space and permissions"
        ) from error


def machine_facts() -> dict[str, object]:
    """Facts about this machine on which compiled code depends, in addition to its source."""
    import torch

    return {"torch": torch.__version__, "machine": platform.machine(), "cpu": _cpu_flags()}


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return a hash of every source file that a graph may be traced from."""
    digest = hashlib.sha256()
    for folder in source_folders():
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
            digest.update(str(path.relative_to(folder.parent)).encode() + path.read_bytes())
    return digest.hexdigest()


def source_folders() -> list[Path]:
    """Return the package's folders from which graphs may be traced: all but those known to trace nothing.

    A new folder is included by default, which may cost a compilation; excluded, it would leave stale graphs.
    """
    home = Path(__file__).parents[2]
    return sorted(path.parent for path in home.glob("*/__init__.py") if path.parent.name not in _WITHOUT_GRAPHS)


def outside_sources(step: nn.Module) -> dict[str, str]:
    """Return a hash of every file outside the package that defines a part of a step, as a user's rule."""
    kinds = {type(value) for part in step.modules() for value in (part, *vars(part).values())}
    names = {kind.__module__ for kind in kinds if kind.__module__.split(".")[0] not in _KNOWN_PACKAGES}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for name, file in files.items() if file}


@lru_cache(maxsize=1)
def _cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(flags.encode()).hexdigest()[:16]
