"""Compile graphs that `paceline export-hlo` wrote with neuronx-cc, which needs no chip, and report the results.

A script with the standard library only: it is copied next to the graphs, so that it runs on a machine with only the
compiler.

    python compile_graphs.py [--jobs N] [--compiler neuronx-cc]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

REPORT = "report.json"


def compiled(folder: Path, graph: dict[str, Any], compiler: str) -> dict[str, Any]:
    """Compile one graph. -> its name, whether it compiled, seconds, bytes of the result, the last lines of the log"""
    made = folder / f"{graph['file']}.neff"
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
        "compiled": status == 0 and made.exists(),
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
    parser.add_argument("--compiler", default="neuronx-cc")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    asked = parser.parse_args(arguments)
    manifest = json.loads((asked.folder / "manifest.json").read_text(encoding="utf-8"))
    graphs = [graph for graph in manifest["graphs"] if graph["format"] == "hlo"]
    if not graphs:
        sys.stderr.write("there is no HLO here: export the graphs again in an environment with torch_xla\n")
        return 2
    with ThreadPoolExecutor(asked.jobs) as pool:
        found = list(pool.map(lambda graph: compiled(asked.folder, graph, asked.compiler), graphs))
    report = {**{name: value for name, value in manifest.items() if name != "graphs"}, "graphs": found}
    (asked.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for one in found:
        state = "ok  " if one["compiled"] else "FAIL"
        size = f"{one['bytes']} bytes, status {one['status']}"
        sys.stdout.write(f"{state} {one['name']}: {one['seconds']} s, {size}\n")
    sys.stdout.write(f"the report is {asked.folder / REPORT}\n")
    return int(not all(one["compiled"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
