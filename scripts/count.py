"""Counts how long the way through the package is: the targets of the architecture, by tracing a tiny random pair.

    python scripts/count.py             prints a table, and a JSON object on the last line
    python scripts/count.py --check     exits with 1 if a count is above its bound in `BOUNDS`; `make check` runs it

A model of two layers and a draft of one, with random weights, decode on the eager backend while every call of a
function of the package is recorded:

    generate      distinct functions, and their files, of `paceline generate`, up to the first call of a compiled step
    sample        the same of a call of `sample`. The same call was made before: what is done once is not counted
    steady round  calls of functions per round outside of the steps: the difference between a long and a
                  short text, over the rounds by which they differ; fused, plain (nothing is drafted, one step a round)
                  and of a text drafter (n-grams)
    named types   classes of the package that are constructed, or whose methods run, in a call outside of the steps
    request       functions, and their files, between a POST of /v1/completions and the engine's queue: HTTP, router,
                  replica and server in one process, without Ray
    answer        the same from there to the last byte of the stream, without the engine's thread
    package       files, lines, classes, protocols and types of options, read from the code
    serve         processes of `paceline serve` for a target without a remote draft, read from the code
    extending     lines of Python in each complete example of docs/extending (one file), and the rows they add

Not a benchmark: no time is measured.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import paceline

ROOT = Path(paceline.__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts.structure import PARTS  # noqa: E402
from tests.serving.small_vocabulary import letters  # noqa: E402

STEP = "eager_step.<locals>.run"
"""Where a step begins: what runs inside of it would run on the device."""

ROW = re.compile(r"(?:Drafter|Rule|Family|Backend)Row\(")
PROMPT = [5, 9, 5, 9, 5]
SHORT, LONG = 21, 101
BEFORE = 3
"""Long calls before those that are traced: all is built, and it is known whether the drafter fits the target."""

SUBMIT = "SharedEngine.submit"
"""Where a request comes to the engine."""

REQUESTS = 5
"""Requests that are traced. What only some of them call depends on which of two tasks goes first: it is left out."""

BOUNDS: dict[str, float] = {
    "generate: functions": 359, "generate: files": 71,
    "sample: functions": 45, "sample: files": 13, "sample: types": 27,
    "round, fused: calls": 10, "round, plain: calls": 9, "round, text: calls": 16,
    "request: functions": 60, "request: files": 18, "answer: functions": 56, "answer: files": 14,
}  # fmt: skip
"""The most that each count may be. Lower one when you have made the way shorter; never raise one."""


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

    def setup(self) -> Way:
        """Distinct functions before the first call of a step."""
        return Way(dict.fromkeys(self.calls[: self.first_step]))


@dataclass(frozen=True)
class Way:
    """Distinct functions that were called, in order."""

    calls: dict[tuple[str, str], None]

    @property
    def functions(self) -> int:
        return len(self.calls)

    @property
    def files(self) -> int:
        return len({file for file, _ in self.calls})

    @property
    def names(self) -> list[str]:
        return [f"{file}:{name}" for file, name in self.calls]


@contextmanager
def traced() -> Iterator[Trace]:
    """Record the calls inside of the block, in this thread and in those that asyncio starts in it."""
    trace, inside = Trace(), [0]  # how many frames of a step are open
    main = threading.current_thread()

    def record(frame: FrameType, event: str, _argument: Any) -> None:
        if event not in ("call", "return"):
            return
        thread = threading.current_thread()
        if thread is not main and not thread.name.startswith("asyncio"):
            return
        file = frame.f_code.co_filename
        if frame.f_code.co_qualname == STEP:
            if event == "call" and not inside[0]:
                trace.first_step = len(trace.calls) if trace.first_step is None else trace.first_step
                trace.calls.append((relative(file), frame.f_code.co_qualname))
            inside[0] += 1 if event == "call" else -1
        elif event == "call" and not inside[0]:
            note(trace, frame)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def note(trace: Trace, frame: FrameType) -> None:
    """Add a call to the trace, if it is of the package."""
    code = frame.f_code
    owner = type_of(frame)
    if owner is not None:
        trace.types.add(owner)
    # Comprehensions and generator expressions are lines of their function; generated constructors have no file. What
    # runs when a module is loaded, as bodies of classes do, is no function.
    named = "<" not in code.co_name + code.co_filename and code.co_flags & CO_OPTIMIZED
    if named and str(frame.f_globals.get("__name__")).startswith("paceline"):
        trace.calls.append((relative(code.co_filename), frame.f_code.co_qualname))


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
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = letters("")
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, max_position_embeddings=256, bos_token_id=None, eos_token_id=None
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return folder


def trace_generate(target: Path, draft: Path) -> Way:
    arguments = ["--target", str(target), "--draft", str(draft), "--prompt", "abab", "--max-new-tokens", "8"]
    with redirect_stdout(StringIO()), traced() as trace:
        from paceline.cli.main import app

        app(["generate", *arguments, "--backend", "eager", "--amp", "f32"], standalone_mode=False)
    return trace.setup()


def count_calls() -> dict[str, Any]:
    """Everything that is counted by tracing; the command first, which loads what the others use."""
    with tempfile.TemporaryDirectory() as folder:
        places = [save_model(Path(folder) / name, layers) for name, layers in (("target", 2), ("draft", 1))]
        generate = trace_generate(*places)
        target, draft = (
            paceline.AutoDecoder.from_pretrained(place, n_positions=256, amp="f32", backend="eager") for place in places
        )
        makers = {"fused": (draft, 4), "plain": (None, 0), "text": ("ngram", 4)}
        made = {mode: paceline.SpeculativeGenerator(source, target, k=k) for mode, (source, k) in makers.items()}
        modes = {mode: trace_rounds(generator) for mode, generator in made.items()}
        request, answer = asyncio.run(trace_request(made["fused"]))
    short, long, _ = modes["fused"]
    return {
        "ways": {"generate": generate, "sample": short.setup(), "request": request, "answer": answer},
        "rounds": {mode: per_round(*traces) for mode, traces in modes.items()},
        "types": sorted(long.types),
    }


async def trace_request(generator: paceline.SpeculativeGenerator) -> tuple[Way, Way]:
    """Functions of streamed requests up to the engine's queue, and of their answers."""
    import httpx2

    from paceline.serving import model_server
    from paceline.serving.api import create_app
    from paceline.serving.router import ModelCard
    from paceline.serving.serve_router import ServeRouter
    from paceline.serving.settings import ApiSettings
    from paceline.workers.shared_engine import SharedEngine
    from tests.serving.replicas import BareReplica, LocalHandle

    model_server._FIRST_TOKEN_WAIT_S = 3600.0  # a slow machine takes the same way
    server = model_server.ModelServer(
        letters(""), SharedEngine(generator), generator.limits, card=ModelCard("m", 0, 256)
    )
    router = ServeRouter({"m": LocalHandle("m", {"m": BareReplica(server)})})
    over = httpx2.ASGITransport(app=create_app(router, ApiSettings(page=False, access_log=False)))
    body = {"model": "m", "prompt": "abab", "max_tokens": 8, "seed": 5, "stream": True}
    ways: list[tuple[list[tuple[str, str]], list[tuple[str, str]]]] = []
    with traced() as trace:
        async with httpx2.AsyncClient(transport=over, base_url="http://here") as client:
            for number in range(1 + REQUESTS):
                for _ in range(50):  # what the last request left to the loop comes to its end
                    await asyncio.sleep(0)
                trace.calls.clear()
                (await client.post("/v1/completions", json=body)).raise_for_status()
                if number:  # the first makes what the others find
                    begun = 1 + [name for _, name in trace.calls].index(SUBMIT)
                    ways.append((trace.calls[:begun], trace.calls[begun:]))
    request, answer = (
        Way({call: None for call in parts[0] if all(call in part for part in parts)})
        for parts in zip(*ways, strict=True)
    )
    return request, answer


def trace_rounds(generator: paceline.SpeculativeGenerator) -> tuple[Trace, Trace, int]:
    """Functions that a short and a long text ran, and the rounds by which they differ."""
    rounds, traces = [], []
    for _ in range(BEFORE):
        generator.sample([PROMPT], max_new_tokens=LONG)
    for length in (SHORT, LONG):
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
    return bool(line.strip()) and not line.strip().startswith("#")


def package(root: Path) -> dict[str, int]:
    files = [path for folder in PARTS for path in (root / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    classes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    protocols = [one for one in classes if any(ast.unparse(base).startswith("Protocol") for base in one.bases)]
    return {
        "files": len(files),
        "lines": sum(len(text.splitlines()) for text in texts),
        "classes": len(classes),
        "protocols": len(protocols),
        "options": sum(one.name.endswith("Options") for one in classes),
    }


def bounded(counts: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, way in counts["ways"].items():
        found |= {f"{name}: functions": way.functions, f"{name}: files": way.files}
    found |= {f"round, {mode}: calls": one["calls"] for mode, one in counts["rounds"].items()}
    return {**found, "sample: types": len(counts["types"])}


def check(found: dict[str, float]) -> int:
    """Say which counts are above their bounds, and which bounds can be lowered. -> exit status"""
    above = [name for name, count in found.items() if count > BOUNDS[name]]
    for name in above:
        print(f"scripts/count.py: {name}: {found[name]}, at most {BOUNDS[name]}; `python scripts/count.py` names them")
    for name in found:
        if found[name] < BOUNDS[name]:
            print(f"scripts/count.py: {name}: {found[name]} now, which is less; lower its bound of {BOUNDS[name]}")
    return 1 if above else 0


def main() -> int:
    counts = count_calls()
    if "--check" in sys.argv[1:]:
        return check(bounded(counts))
    for title, names in (
        *((f"{name}: functions", way.names) for name, way in counts["ways"].items()),
        *(
            (f"steady round, {mode}: calls outside of the steps", one["names"])
            for mode, one in counts["rounds"].items()
        ),
        ("named types", counts["types"]),
    ):
        print(f"\n{title}")
        for name in names:
            print(f"  {names[name]:6.2f}  {name}" if isinstance(names, dict) else f"  {name}")
    print()
    of_code = {"package": package(ROOT), "serve": serve_processes(ROOT), "extending": extending(ROOT)}
    print(json.dumps({**bounded(counts), **of_code}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
