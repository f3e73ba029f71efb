"""Shared by the benchmarks: the demo family, and the facts that every report names."""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples" / "pycode"


def llama_cpp(file: Path, positions: int, *, batch: int = 512) -> Any:
    """A model of llama.cpp (the package llama-cpp-python) that uses every core."""
    from llama_cpp import Llama

    cores = os.cpu_count() or 1
    return Llama(str(file), n_ctx=positions, n_batch=batch, n_threads=cores, n_threads_batch=cores, verbose=False)


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child(*arguments: str) -> Any:
    """Run this benchmark in a separate process, show the JSON object on its last line and return it."""
    command = [sys.executable, sys.argv[0], *arguments]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    row = json.loads(output.splitlines()[-1])
    print(row, flush=True)
    return row


def facts() -> dict[str, object]:
    """Date, commit, command, machine and versions: what `scripts/report.py` compares and shows."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": " ".join([str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def commit() -> str:
    """The newest commit that changed what is measured; marked where files were changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    sources = ("--", ".", *(f":!{path}" for path in ("benchmarks/results", "docs", "scripts", "tests", "*.md")))
    changed = git("status", "--porcelain", "--untracked-files=no", *sources)
    return git("log", "-1", "--format=%h", *sources) + ("-dirty" if changed else "")


def machine() -> dict[str, object]:
    """Processor, cores, the widest instructions that PyTorch uses, and memory."""
    fields = {}
    if (listing := Path("/proc/cpuinfo")).is_file():
        first = listing.read_text().split("\n\n")[0].splitlines()
        fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    name = fields.get("model name", platform.processor() or platform.machine())
    kind = ", ".join(f"{key.removeprefix('cpu ')} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    special = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    return {
        "cpu": f"{name} ({kind})" if kind else name,
        "cores": os.cpu_count(),
        "instructions": ", ".join([torch.backends.cpu.get_cpu_capability(), *special]),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }


def publish(report: dict[str, object]) -> None:
    """Show a report to a reader, and on the last line to a program."""
    print(json.dumps(report, indent=1))
    print(json.dumps({**facts(), **report}))
