"""The parts of the native libraries, the processors of prebuilt ones, and the call of the C++ compiler.

``setup.py`` uses this module without PyTorch, so the module must not import it.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import BackendError

HERE = Path(__file__).parent
PREBUILT = HERE / "prebuilt"
"""Libraries shipped with the package: kernels-PROCESSOR.so, and program-VERSION_OF_TORCH.so. Absent in a checkout."""


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """A shared library.

    sources  its files, and the approximate core seconds to compile each
    headers  the project's headers that they include
    flags    compiler flags
    link     linker flags
    """

    name: str
    sources: Mapping[str, float]
    headers: str
    flags: tuple[str, ...]
    link: tuple[str, ...] = ()

    def source_hash(self) -> str:
        """Return a hash of every source except third-party headers."""
        files = [*sorted(HERE.glob(self.headers) if self.headers else []), *(HERE / name for name in self.sources)]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

    def with_flags(self, *flags: str) -> Library:
        return replace(self, flags=(*self.flags, *flags))


# -ffp-contract=off: noise must be bitwise identical to its PyTorch form; fused multiply-adds are called by name. With
# -O2, attention takes a twentieth longer, and sampling a token twice as long.
KERNELS = Library(
    "kernels",
    {"attention.cpp": 8, "products.cpp": 6, "kernels.cpp": 5, "rows.cpp": 2},
    "*.h",
    ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC"),
)


def program(torch: Path) -> Library:
    """Return the library that runs recorded steps; PyTorch's headers, from ``torch``, need C++20 and OpenMP."""
    flags = ("-O2", "-std=c++20", "-fopenmp", "-fPIC", "-I", str(torch / "include"))
    return Library("program", {"program.cpp": 12}, "", flags, ("-L", str(torch / "lib"), "-ltorch_cpu", "-lc10"))


@dataclass(frozen=True, slots=True)
class CpuKind:
    """A kind of processor with prebuilt kernels. ``needs``: flags of Linux's /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave", "popcnt", "sse4_2", "ssse3"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PROCESSORS = (
    CpuKind(
        "x86-64-v4-bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-int8"),
        _V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    CpuKind("x86-64-v4", ("-march=x86-64-v4",), _V4),
    CpuKind("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""Processors, the fastest first. Results are bitwise identical on all: see integers.h, pairs.h and vectors.h. AMX is
compiled in where it may be present, and used if it is (tiles.h).
"""


def fitting(flags: frozenset[str]) -> list[CpuKind]:
    """Return the entries whose kernels a processor with these flags can run, the fastest first."""
    return [one for one in PROCESSORS if one.needs <= flags]


def cpu_flags() -> frozenset[str]:
    """Return the flags of this machine's processor; empty if Linux does not list them."""
    info = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not info.is_file():
        return frozenset()
    line = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def compile_libraries(
    libraries: Mapping[Path, Library], compiler: str, *, cores: int, report: Callable[[int, float], None]
) -> None:
    """Compile every library into its path, all files in parallel, the slowest first; raise BackendError if one fails.

    ``report`` is called after each file with the number of finished ones, and their share of the work.
    """
    files = [(path, library, name) for path, library in libraries.items() for name in library.sources]
    files.sort(key=lambda file: -file[1].sources[file[2]])
    total, done = sum(library.sources[name] for _, library, name in files), 0.0
    with ThreadPoolExecutor(cores) as pool:
        running = {
            pool.submit(
                _run, [compiler, *library.flags, "-c", str(HERE / name), "-o", str(_object(path, name))], name
            ): library.sources[name]
            for path, library, name in files
        }
        try:
            for count, future in enumerate(as_completed(running), 1):
                future.result()
                done += running[future]
                report(count, done / total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for path, library in libraries.items():
        objects = [_object(path, name) for name in library.sources]
        _run([compiler, "-shared", *map(str, objects), "-o", str(path), *library.link], path.name)
        for one in objects:
            one.unlink()


def _object(path: Path, name: str) -> Path:
    return path.with_name(f"{path.stem}.{Path(name).stem}.o")


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        ended = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
        raise BackendError(
            f"building {what} failed: {command[0]} {ended}; read the compiler's output below, free memory if it ran "
            "out (0.6 GB per file), set CXX to another compiler, or use "
            f"backend='eager'\n{' '.join(command)}\n{done.stderr[-2000:]}"
        )
