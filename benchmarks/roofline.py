"""Time the matmuls of every format and attention at 1 to 17 rows, as shares of their roofs. JSON on the last line.

    python benchmarks/roofline.py                           the kernels of this processor
    python benchmarks/roofline.py --processor x86-64-v3     those of a wheel for such processors
    python benchmarks/roofline.py --log                     and write their table in benchmarks/log.md

A matmul is a pass over matrices of SmolLM2's sizes that fill ``--megabytes``; attention reads caches of that size at
4,096 positions. The memory roof is the time to sum every word of the same memory in order; the arithmetic roof is the
time of the multiply-adds by the format's instructions on registers alone (benchmarks/roof.cpp). The larger of the two
binds, and a share is that roof's time over the measured one. All rows of a kernel take turns; times are medians, roofs
the best seen.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from common import ROOT, commit, machine, publish
from torch import Tensor

from paceline.decoder.native import build
from paceline.decoder.native.compiler import HERE, KERNELS, PROCESSORS, Library
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import quantize

ROWS = range(1, 18)
LAYER = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # K and N
HEADS, GROUPS, WIDTH, POSITIONS = 9, 3, 64, 4096
PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
QUANTISED = ("int8", "fp8_e4m3", "q8_0", "q4_0", "q4_1")
TURNS = 1 << 16  # of the instructions of a roof
SETTLE_S = 0.02  # OpenMP's threads spin after a sum


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel over memory larger than the caches.

    run    runs it on a number of rows
    memory what it reads
    macs   multiply-adds of a row
    code   the format whose instructions it takes
    """

    run: Callable[[int], None]
    memory: list[Tensor]
    macs: int
    code: int


def call(function: ctypes._CFuncPtr, *arguments: Tensor | float | None) -> None:
    """Call a kernel; tensors go as pointers."""
    function(
        *(
            ctypes.c_float(one)
            if isinstance(one, float)
            else ctypes.c_int64(one)
            if isinstance(one, int)
            else ctypes.c_void_p(one.data_ptr() if one is not None else None)
            for one in arguments
        )
    )


def matmuls(library: ctypes.CDLL, name: str, megabytes: int) -> Kernel:
    torch.manual_seed(0)
    matrices: list[tuple[int, int, Tensor, Tensor | None]] = []
    for K, N in LAYER:
        weight = torch.randn(N, K)
        if name in PLAIN:
            matrices.append((K, N, weight.to(PLAIN[name]), None))
        else:
            stored = quantize(weight, WeightFormat(name))
            matrices.append((K, N, stored.data, stored.scales))
    copies = -(-megabytes * 10**6 // sum(data.nbytes for _, _, data, _ in matrices))
    every = [(K, N, data.clone(), scales) for _ in range(copies) for K, N, data, scales in matrices]
    code = list(PLAIN).index(name) if name in PLAIN else WeightFormat(name).code
    x, out = torch.randn(max(ROWS), 1536), torch.empty(max(ROWS), 3072)

    def run(rows: int) -> None:
        for K, N, data, scales in every:
            call(library.paceline_linear, x, data, scales, out, rows, K, N, code)

    return Kernel(run, [data for _, _, data, _ in every], sum(K * N for K, N, _, _ in every), code)


def attention(library: ctypes.CDLL, name: str, megabytes: int) -> Kernel:
    dtype = PLAIN[name]
    torch.manual_seed(0)
    one = torch.randn(1, GROUPS, POSITIONS, WIDTH).to(dtype)
    caches = [one.clone() for _ in range(2 * -(-megabytes * 10**6 // (2 * one.nbytes)))]
    q, k, v = (torch.randn(max(ROWS) * n * WIDTH) for n in (HEADS, GROUPS, GROUPS))
    out, zero = torch.empty(max(ROWS) * HEADS * WIDTH), torch.zeros(1, dtype=torch.int32)
    first, code = torch.tensor([POSITIONS - max(ROWS)], dtype=torch.int32), list(PLAIN).index(name)

    def run(rows: int) -> None:
        count = torch.tensor([rows], dtype=torch.int32)
        sizes = torch.tensor([1, rows, HEADS, GROUPS, WIDTH, POSITIONS, 0])
        for at in range(0, len(caches), 2):
            place = (*caches[at : at + 2], out, first, count, zero, None, sizes)
            call(library.paceline_attend, q, k, v, *place, code, 0, 0.0, None, None)

    return Kernel(run, caches, len(caches) * HEADS * POSITIONS * WIDTH, 0)


def seconds(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def measure(kernel: Kernel, roof: Callable[[int, int], int], repeats: int) -> dict[str, Any]:
    """Milliseconds, share of the roof and the roof that binds, by rows."""
    words = [one.view(torch.uint8).flatten() for one in kernel.memory]
    streams = [one[: len(one) // 4 * 4].view(torch.int32) for one in words]
    reads: list[float] = []
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    a_mac: list[float] = []
    for turn in range(repeats + 1):
        reads.append(seconds(lambda: [one.sum(dtype=torch.int32) for one in streams]))
        sleep(SETTLE_S)
        begin = perf_counter()
        done = roof(kernel.code, TURNS)
        a_mac.append((perf_counter() - begin) / done)
        for rows, found in times.items():
            found.append(seconds(lambda rows=rows: kernel.run(rows)))
        if not turn:
            reads.clear(), a_mac.clear(), [found.clear() for found in times.values()]
    read, mac = min(reads), min(a_mac) / torch.get_num_threads()
    made: dict[str, Any] = {"read_ms": round(1e3 * read, 3), "gmacs": round(1e-9 / mac, 1)}
    for rows, found in times.items():
        arithmetic, taken = mac * kernel.macs * rows, statistics.median(found)
        made[str(rows)] = {
            "ms": round(1e3 * taken, 3),
            "share": round(max(arithmetic, read) / taken, 3),
            "roof": "memory" if read > arithmetic else "arithmetic",
        }
    return made


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table of a log: milliseconds, and the percentage of the roof of memory (m) or arithmetic (a)."""
    lines = [f"| kernel | {' | '.join(map(str, ROWS))} |", "|---|" + "---|" * len(ROWS)]
    for name, row in found.items():
        cells = [row[str(rows)] for rows in ROWS]
        texts = [f"{one['ms']:.3g}, {100 * one['share']:.0f} {one['roof'][0]}" for one in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def write(processor: str, made: str) -> None:
    """Replace the table of the kernels of a processor in the log."""
    mark, end = f"<!-- roofline {processor} -->\n", "<!-- end -->\n"
    before, rest = (log := ROOT / "benchmarks" / "log.md").read_text().split(mark)
    title = f"`{processor}`: {machine()['cpu']}, {torch.get_num_threads()} threads, commit {commit()}.\n"
    log.write_text(f"{before}{mark}{title}\n{made}{end}{rest.split(end, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processor", choices=["native", *(one.name for one in PROCESSORS)], default="native")
    parser.add_argument("--formats", nargs="*", choices=[*PLAIN, *QUANTISED], default=[*PLAIN, *QUANTISED])
    parser.add_argument("--attention", nargs="*", choices=PLAIN, default=list(PLAIN), help="types of the cache")
    parser.add_argument("--megabytes", type=int, default=100, help="memory that a kernel reads")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--log", action="store_true", help="write the table of benchmarks/log.md")
    options = parser.parse_args()
    flags = {one.name: one.flags for one in PROCESSORS}.get(options.processor, ("-march=native",))
    roofs = Library("roof", {str(Path(__file__).with_name("roof.cpp")): 1}, "*.h", (*KERNELS.flags, "-I", str(HERE)))
    library, roof = build.load([(one.with_flags(*flags), ()) for one in (KERNELS, roofs)])
    roof.roof.argtypes, roof.roof.restype = [ctypes.c_int64, ctypes.c_int64], ctypes.c_int64
    found = {name: measure(matmuls(library, name, options.megabytes), roof.roof, options.repeats)
             for name in options.formats}  # fmt: skip
    for name in options.attention:
        found[f"attention, {name}"] = measure(attention(library, name, options.megabytes), roof.roof, options.repeats)
    if options.log:
        write(options.processor, table(found))
    publish({"processor": options.processor, "megabytes": options.megabytes, "kernels": found})


if __name__ == "__main__":
    main()
