"""Where figures come from: versions, commit, machine and time. Part of every row of results."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import paceline

_PROGRAM = {"paceline_version": "paceline", "git_commit": "commit", "torch": "torch", "transformers": "transformers"}


def provenance() -> dict[str, object]:
    """Plain values: who measured this, with what."""
    import torch

    return {
        "paceline_version": paceline.__version__,
        "git_commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "machine": socket.gethostname(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def program(source: Mapping[str, object]) -> str:
    """Of a provenance, what says by which program figures were made: figures of two programs may differ for that."""
    return ", ".join(f"{name} {source[key]}" for key, name in _PROGRAM.items() if source.get(key))


@cache
def commit() -> str:
    """The commit of the sources, marked where they were changed since; "" for an installed package."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


@cache
def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
