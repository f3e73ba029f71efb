"""Compile graphs that `paceline export-hlo` wrote, which needs no chip, and report the results.

A script with the standard library only: it is copied next to the graphs, so that it runs on a machine with only a
compiler. Either neuronx-cc compiles their HLO, or TorchNeuron compiles them in its compile-only mode.

    python compile_graphs.py [--jobs N] [--compiler neuronx-cc | --compiler torch]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

REPORT = "report.json"


TORCH = """
import json, runpy, sys, torch
tensors = [torch.empty(shape, dtype=getattr(torch, kind), device="meta") for kind, shape in json.loads(sys.argv[2])]
forward = runpy.run_path(sys.argv[1])["forward"]
with torch.no_grad():
    torch.compile(forward, backend="neuron", fullgraph=True, dynamic=False)(*tensors)
"""


def compiled(folder: Path, graph: dict[str, Any], *, compiler: str, target: str) -> dict[str, Any]:
    """Compile one graph. -> its name, whether it compiled, seconds, bytes of the result, the last lines of the log"""
    made = folder / f"{graph['name']}.neff"
    if compiler == "torch":  # keeps the result in its own cache
        command = ["env", "TORCH_NEURONX_COMPILE_ONLY=1", f"NEURON_PLATFORM_TARGET_OVERRIDE={target}", sys.executable]
        command += ["-c", TORCH, str(folder / graph["torch_file"]), json.dumps(graph["tensors"])]
    else:
        command = [*shlex.split(compiler), "compile", "--framework", "XLA", str(folder / graph["file"])]
        command += ["--output", str(made), *shlex.split(graph["flags"])]
    begin = perf_counter()
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        status, log = done.returncode, done.stdout + done.stderr
    except OSError as error:
        status, log = 127, str(error)
    return {
        "name": graph["name"],
        "compiled": status == 0 and (compiler == "torch" or made.exists()),
        "status": status,
        "seconds": round(perf_counter() - begin, 1),
        "bytes": made.stat().st_size if made.exists() else 0,
        "instructions": graph.get("instructions"),
        "expected_ms": graph.get("expected_ms"),
        "log": log.splitlines()[-20:],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile every graph of this file's folder, and write the report to it. -> 1 if one did not compile"""
    parser = argparse.ArgumentParser(description="Compile the graphs in this file's folder.")
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of compilers to run at a time; each can take several GB"
    )
    parser.add_argument("--compiler", default="neuronx-cc", help="a command, or torch: TorchNeuron of this Python")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    asked = parser.parse_args(arguments)
    manifest = json.loads((asked.folder / "manifest.json").read_text(encoding="utf-8"))
    native = asked.compiler == "torch"
    graphs = [graph for graph in manifest["graphs"] if ("torch_file" in graph if native else graph["format"] == "hlo")]
    if not graphs:
        needs = "for Trainium2 or Trainium3" if native else "in an environment with torch_xla"
        sys.stderr.write(f"there is nothing here that {asked.compiler} compiles: export the graphs again {needs}\n")
        return 2
    with ThreadPoolExecutor(asked.jobs) as pool:
        run = partial(compiled, asked.folder, compiler=asked.compiler, target=manifest["target"])
        found = list(pool.map(run, graphs))
    whole = {name: value for name, value in manifest.items() if name != "graphs"}
    report = {**whole, "compiler": asked.compiler, "graphs": found}
    (asked.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for one in found:
        state = "ok  " if one["compiled"] else "FAIL"
        size = f"{one['bytes']} bytes, status {one['status']}"
        sys.stdout.write(f"{state} {one['name']}: {one['seconds']} s, {size}\n")
    sys.stdout.write(f"the report is {asked.folder / REPORT}\n")
    return int(not all(one["compiled"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
