"""How long a user waits for the first token: cold, with the cache, and with one option changed. JSON comes last.

    python benchmarks/first_answer.py                                all cases
    python benchmarks/first_answer.py --cases generate chat         some
    python benchmarks/first_answer.py --beside ../before            the same commands of another checkout, in turns
    python benchmarks/first_answer.py --models smollm2 --repeats 3

Cold begins with an empty cache, so that kernels are built. Each command is a process of its own; a figure is the median
of the repeats (cold runs once). The first token is the first byte on stdout, or the first event of a stream. Processor
seconds are those of the command and its children; of `serve` none, since Ray's processes outlive their parents.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, free_port, publish

PAIR = ["--target", "examples/pycode/target", "--draft", "examples/pycode/draft"]
SMOLLM2 = ["--target", "smollm2", "--draft", "examples/smollm2/eagle3:k=3"]
PROMPT = ["--prompt", "def main(argv=None):", "--max-new-tokens", "32"]
QUESTION = "What is the capital of France?\n"
LIMIT_S = 900.0

Waits = tuple[float, float, float]
"""Seconds to the first token, to the end, and of processors."""


@dataclass(frozen=True)
class Case:
    """A command, what is changed in it, and how its first token is seen."""

    name: str
    model: str
    command: Sequence[str]
    changed: Sequence[str]
    run: Callable[[list[str], dict[str, str], Path], Waits]


def by_stdout(command: list[str], variables: dict[str, str], folder: Path, *, given: str = "") -> Waits:
    """Time of a command that writes its response to stdout."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(given.encode())
    process.stdin.close()
    first = process.stdout.read(1)
    waited = time.perf_counter() - begin
    process.stdout.read()
    if process.wait() or not first:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, or gave no answer")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return waited, time.perf_counter() - begin, spent


def by_question(command: list[str], variables: dict[str, str], folder: Path) -> Waits:
    return by_stdout(command, variables, folder, given=QUESTION)


def by_request(command: list[str], variables: dict[str, str], folder: Path) -> Waits:
    """Time of a server: from the command to the first event of a stream."""
    port, begin = free_port(), time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)], cwd=folder, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not _ready(port):
            if process.poll() is not None or time.perf_counter() - begin > LIMIT_S:
                raise RuntimeError(f"{' '.join(command)} does not serve")
            time.sleep(0.05)
        model = "pycode" if "pycode" in " ".join(command) else "smollm2"
        body = {"model": model, "prompt": "def main", "max_tokens": 8, "stream": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            answer.readline()
            waited = time.perf_counter() - begin
            answer.read()
        return waited, time.perf_counter() - begin, 0.0
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


CASES = (
    Case("generate", "pycode", ["generate", *PAIR, *PROMPT], ["--k", "3"], by_stdout),
    Case("generate, other length", "pycode", ["generate", *PAIR, *PROMPT], ["--n-positions", "768"], by_stdout),
    Case("generate, other batch", "pycode", ["generate", *PAIR, *PROMPT], ["--batch-size", "4"], by_stdout),
    Case("chat", "smollm2", ["chat", *SMOLLM2, "--n-positions", "2048"], ["--temperature", "0.7"], by_question),
    Case("chat, suffix", "smollm2", ["chat", "--target", "smollm2", "--draft", "suffix"], ["--k", "3"], by_question),
    Case("chat, int8", "smollm2", ["chat", *SMOLLM2], ["--quantization", "int8"], by_question),
    Case("serve", "smollm2", ["serve", *SMOLLM2, "--n-positions", "2048"], ["--batch-size", "4"], by_request),
    Case("demo", "smollm2", ["examples/demo.py"], ["--k", "2"], by_stdout),
)


@contextmanager
def cache(filled: Path | None) -> Iterator[Path]:
    """A separate cache, empty but for fetched models; or the filled one."""
    if filled is not None:
        yield filled
        return
    with tempfile.TemporaryDirectory() as folder:
        fetched = Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser() / "models"
        if fetched.is_dir():
            shutil.copytree(fetched, Path(folder) / "models")
        yield Path(folder)


def timed(case: Case, checkout: Path, root: Path, more: Sequence[str] = ()) -> Waits:
    programs = checkout / ".venv" / "bin"
    program = [str(programs / "python")] if case.command[0].endswith(".py") else [str(programs / "paceline")]
    return case.run([*program, *case.command, *more], {**os.environ, "PACELINE_CACHE": str(root)}, checkout)


def row(case: Case, checkouts: dict[str, Path], repeats: int) -> Iterator[dict[str, object]]:
    """A line for each checkout and state of the cache. Checkouts take turns."""
    found: dict[tuple[str, str], list[Waits]] = {}
    with tempfile.TemporaryDirectory() as folder:
        roots = {name: Path(folder) / name for name in checkouts}
        for name, checkout in checkouts.items():
            with cache(None) as made:
                shutil.copytree(made, roots[name])
            found[name, "cold"] = [timed(case, checkout, roots[name])]
        for _ in range(repeats):
            for name, checkout in checkouts.items():
                found.setdefault((name, "cached"), []).append(timed(case, checkout, roots[name]))
        for name, checkout in checkouts.items():
            found[name, "changed " + " ".join(case.changed)] = [timed(case, checkout, roots[name], case.changed)]
    for (name, state), runs in found.items():
        first, end, processor = (round(statistics.median(one), 2) for one in zip(*runs, strict=True))
        yield {"case": case.name, "checkout": name, "cache": state, "first": first, "end": end, "processor": processor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--models", nargs="+", default=["pycode", "smollm2"])
    parser.add_argument("--beside", type=Path, help="another checkout, with an environment in .venv")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    checkouts = {"this": ROOT, **({"other": arguments.beside.resolve()} if arguments.beside else {})}
    rows = []
    print(f"{'case':26}{'checkout':10}{'cache':28}{'first s':>9}{'end s':>9}{'processor s':>13}")
    for case in CASES:
        if case.name in arguments.cases and case.model in arguments.models:
            for line in row(case, checkouts, arguments.repeats):
                rows.append(line)
                figures = f"{line['first']:>9}{line['end']:>9}{line['processor']:>13}"
                print(f"{line['case']:26}{line['checkout']:10}{line['cache']:28}{figures}", flush=True)
    publish({"rows": rows, "repeats": arguments.repeats})


if __name__ == "__main__":
    sys.exit(main())
