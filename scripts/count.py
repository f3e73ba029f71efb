"""Counts how long the way through the package is: the targets of the architecture, by tracing a tiny random pair.

    python scripts/count.py             prints a table, and a JSON object on the last line

A model of two layers and a draft of one, with random weights, decode on the eager backend while every call of a
function of the package is recorded:

    set-up        distinct functions, and their files, between a call of `sample` and the first call of a compiled step.
                  The same call was made before, so that what is done once is not counted
    steady round  calls of functions per round outside of the steps: the difference between a long and a
                  short text, over the rounds by which they differ; fused, plain (nothing is drafted, one step a round)
                  and of a text drafter (n-grams)
    named types   classes of the package that are constructed, or whose methods run, in a call outside of the steps
    serve         processes of `paceline serve` for a target without a remote draft, read from the code
    extending     lines of Python in each complete example of docs/extending (one file), and the rows they add

Only the public API is used, so that the script counts any commit alike. Not a benchmark: no time is measured.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import paceline

ROOT = Path(paceline.__file__).resolve().parents[1]
STEP = "eager_step.<locals>.run"
"""Where a step begins: what runs inside of it would run on the device."""

ROW = re.compile(r"(?:Drafter|Rule|Family|Backend)Row\(")
PROMPT = [5, 9, 5, 9, 5]
SHORT, LONG = 21, 101
BEFORE = 12
"""Calls before the one that is traced: all is built, and it is known whether the drafter fits the target."""


@dataclass
class Trace:
    """Functions that a call ran, in order.

    calls       (file, function) of every call outside of steps
    types       classes that were constructed or whose methods ran there
    first_step  how many calls came before the first call of a step
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    types: set[str] = field(default_factory=set)
    first_step: int | None = None

    def setup(self) -> dict[str, object]:
        """Distinct functions before the first call of a step, and their files."""
        before = dict.fromkeys(self.calls[: self.first_step])
        files = sorted({file for file, _ in before})
        return {"functions": len(before), "files": len(files), "names": [f"{file}:{name}" for file, name in before]}


@contextmanager
def traced() -> Iterator[Trace]:
    """Record the calls inside of the block."""
    trace, inside = Trace(), [0]  # how many frames of a step are open

    def record(frame: FrameType, event: str, _argument: Any) -> None:
        if event not in ("call", "return"):
            return
        file = frame.f_code.co_filename
        if frame.f_code.co_qualname == STEP:
            if event == "call" and not inside[0]:
                trace.first_step = len(trace.calls) if trace.first_step is None else trace.first_step
                trace.calls.append((relative(file), name_of(frame)))
            inside[0] += 1 if event == "call" else -1
        elif event == "call" and not inside[0]:
            note(trace, frame)

    sys.setprofile(record)
    try:
        yield trace
    finally:
        sys.setprofile(None)


def note(trace: Trace, frame: FrameType) -> None:
    """Add a call to the trace, if it is of the package."""
    code = frame.f_code
    owner = type_of(frame)
    if owner is not None:
        trace.types.add(owner)
    # Comprehensions and generator expressions are lines of their function; generated constructors have no file.
    if str(frame.f_globals.get("__name__")).startswith("paceline") and "<" not in code.co_name + code.co_filename:
        trace.calls.append((relative(code.co_filename), name_of(frame)))


def name_of(frame: FrameType) -> str:
    """The function with its class, where Python knows it (from 3.11 on)."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))


def type_of(frame: FrameType) -> str | None:
    """The package's class whose method this is; generated constructors included."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] not in ("self", "cls", "_cls"):
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    kind = first if isinstance(first, type) else type(first)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("paceline") else None


def relative(file: str) -> str:
    return Path(file).resolve().relative_to(ROOT).as_posix()


def save_model(folder: Path, layers: int) -> Path:
    """A small random checkpoint."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, max_position_embeddings=256, bos_token_id=None, eos_token_id=None
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def count_calls() -> dict[str, object]:
    """Everything that is counted by tracing."""
    with tempfile.TemporaryDirectory() as folder:
        models = [
            paceline.AutoDecoder.from_pretrained(
                save_model(Path(folder) / name, layers), n_positions=256, amp="f32", backend="eager"
            )
            for name, layers in (("target", 2), ("draft", 1))
        ]
        target, draft = models
        makers = {"fused": (draft, 4), "plain": (None, 0), "text": ("ngram", 4)}
        made = {mode: paceline.SpeculativeGenerator(source, target, k=k) for mode, (source, k) in makers.items()}
        modes = {mode: trace_rounds(generator) for mode, generator in made.items()}
    short, long, _ = modes["fused"]
    types = sorted(long.types)
    return {
        "setup": short.setup(),
        "steady_round": {mode: per_round(*traces) for mode, traces in modes.items()},
        "named_types": {"count": len(types), "names": types},
    }


def trace_rounds(generator: paceline.SpeculativeGenerator) -> tuple[Trace, Trace, int]:
    """Functions that a short and a long text ran, and the rounds by which they differ."""
    rounds, traces = [], []
    for length in (SHORT, LONG):
        for _ in range(BEFORE):
            generator.sample([PROMPT], max_new_tokens=length)
        with traced() as trace:
            generator.sample([PROMPT], max_new_tokens=length)
        rounds.append(generator.statistics.num_rounds)
        traces.append(trace)
    return traces[0], traces[1], rounds[1] - rounds[0]


def per_round(short: Trace, long: Trace, rounds: int) -> dict[str, object]:
    """Calls of functions in a steady round."""
    counted = Counter(long.calls)
    counted.subtract(Counter(short.calls))
    names = {f"{file}:{name}": round(count / rounds, 2) for (file, name), count in counted.items() if count}
    return {"calls": round(sum(counted.values()) / rounds, 1), "names": names}


def serve_processes(root: Path) -> dict[str, object]:
    """Ray Serve's HTTP proxy, and a process for every deployment in the code."""
    deployments = 0
    for file in sorted((root / "orchestrator" / "serving").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "serve.deployment":
                deployments += 1
    return {"proxy": 1, "deployments": deployments, "total": 1 + deployments}


def extending(root: Path) -> dict[str, object]:
    """Python of every complete example of docs/extending, which is one file: its lines, without blank ones and
    comments, by its first line; and rows of a registry.
    """
    pages: dict[str, object] = {}
    for page in sorted((root / "docs" / "extending").glob("*.md")):
        blocks = re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        files = [block for block in blocks if not ROW.search(block)]
        lines = {block.splitlines()[0]: sum(map(is_code, block.splitlines())) for block in files}
        pages[page.stem] = {"lines": lines, "rows": sum(len(ROW.findall(block)) for block in blocks)}
    return pages


def is_code(line: str) -> bool:
    """Whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not line.strip().startswith("#")


def main() -> None:
    """Print the counts."""
    counts: dict[str, Any] = {**count_calls(), "serve": serve_processes(ROOT), "extending": extending(ROOT)}
    steady = counts["steady_round"]
    for title, names in (
        ("set-up: functions before the first call of a step", counts["setup"]["names"]),
        *((f"steady round, {mode}: calls outside of the steps", one["names"]) for mode, one in steady.items()),
        ("named types", counts["named_types"]["names"]),
    ):
        print(f"\n{title}")
        for name in names:
            print(f"  {names[name]:6.2f}  {name}" if isinstance(names, dict) else f"  {name}")
    print()
    totals = {
        "setup_functions": counts["setup"]["functions"],
        "setup_files": counts["setup"]["files"],
        "calls_per_round": {mode: one["calls"] for mode, one in steady.items()},
        "named_types": counts["named_types"]["count"],
        "serve_processes": counts["serve"],
        "extending": counts["extending"],
    }
    print(json.dumps(totals))


if __name__ == "__main__":
    main()
