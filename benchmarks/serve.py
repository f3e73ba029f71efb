"""How fast a service is, against the same engine without one, in the same run and in turns with it.

    python -m benchmarks.serve --target DIR [--draft DIR | ngram ...] [--streams 1 16 64] [--rates 2]

Closed loop: so many streams, each of which begins its next request when the last has ended. Open loop (--rates):
requests begin at random moments, so many a second, whatever the service does, but never more than 256 at a time. The
client runs on the same machine, over loopback, and takes its share of the processor. Prints JSON on its last line:
tokens_per_s      of all streams together
offline           the same prompts by the engine in a process of its own, with as many threads as the service's, after a
                  first run in which graphs are made; batch 1 for one stream, else the batch size
ratio             tokens_per_s / offline
first_token_s     median and 99th percentile, from sending the request
cpu_us_per_token  processor time of each process of the service
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from ray import serve

from benchmarks.common import publish
from benchmarks.service_processes import processes
from paceline import AutoDecoder, SpeculativeGenerator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.host import environment
from paceline.placement.planning.detect import host_cpus
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.serving.app import application
from paceline.serving.settings import DEFAULT_STREAM_INTERVAL_MS, ApiSettings
from paceline.text.tokenizer import load_tokenizer

PROMPTS = ["def main", "class Queue:", "import os", "# sorts a list\n", "def test_", "for line in"]
_MOST = 256  # requests at a time, in the open loop
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds since it was sent."""

    tokens: int
    first_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """One load; see the module. ``failed``: requests that were not answered to their end."""

    load: str
    requests: int
    failed: int
    tokens_per_s: float
    offline: float
    ratio: float
    first_token_s: tuple[float, float]
    cpu_us_per_token: dict[str, float]


async def ask(port: int, prompt: str, tokens: int, seed: int) -> Answer | None:
    """One streamed request, by a client that does next to nothing; None: it failed."""
    body = json.dumps(
        {"model": "big", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": seed, "stream": True,
         "stream_options": {"include_usage": True}}
    ).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    begin, first, tail = time.perf_counter(), 0.0, b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        while data := await reader.read(1 << 16):
            if not first and b"data: " in data:
                first = time.perf_counter() - begin
            tail = (tail + data)[-4096:]
        writer.close()
        lines = [line[6:] for line in tail.splitlines() if line.startswith(b"data: {")]
        count = int(json.loads(lines[-1])["usage"]["completion_tokens"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return Answer(count, first, time.perf_counter() - begin)


async def closed(port: int, prompts: Sequence[str], tokens: int, *, streams: int, each: int) -> list[Answer | None]:
    """``each`` requests of each stream."""

    async def one(stream: int) -> list[Answer | None]:
        return [
            await ask(port, prompts[(stream + number) % len(prompts)], tokens, stream * each + number)
            for number in range(each)
        ]

    return [answer for answers in await asyncio.gather(*map(one, range(streams))) for answer in answers]


async def opened(port: int, prompts: Sequence[str], tokens: int, *, rate: float, count: int) -> list[Answer | None]:
    """``count`` requests, ``rate`` a second in the mean."""
    draw, places, running = random.Random(0), asyncio.Semaphore(_MOST), list[asyncio.Task[Answer | None]]()

    async def one(number: int) -> Answer | None:
        async with places:
            return await ask(port, prompts[number % len(prompts)], tokens, number)

    for number in range(count):
        running.append(asyncio.create_task(one(number)))
        await asyncio.sleep(draw.expovariate(rate))
    return list(await asyncio.gather(*running))


def offline(options: argparse.Namespace, *, batch_size: int) -> float:
    """Tokens a second of the engine in a process of its own, over as many prompts as it has slots."""
    variables = {"OMP_NUM_THREADS": options.threads} if options.threads else {}
    asked = [sys.executable, "-m", "benchmarks.serve", *sys.argv[1:], "--offline", str(batch_size)]
    done = subprocess.run(asked, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True)
    return float(done.stdout.split()[-1])


def run_offline(options: argparse.Namespace) -> float:
    """The same, in this process."""
    batch_size = options.offline
    target = AutoDecoder.from_pretrained(
        options.target, batch_size=batch_size, n_positions=options.n_positions, amp=options.amp, backend=options.backend
    )
    draft, depth = options.draft or None, {"k": options.k} if options.k and options.draft else {}
    generator = SpeculativeGenerator(draft[0] if draft and len(draft) == 1 else draft, target, **depth)
    tokenizer = load_tokenizer(options.target)
    ids = [tokenizer.encode(PROMPTS[row % len(PROMPTS)]) for row in range(batch_size)]
    generator.compile()
    best = 0.0
    for run in range(4):
        begin = time.perf_counter()
        result = generator.sample(ids, max_new_tokens=options.tokens, return_dict=True)
        tokens = sum(result.lengths) - sum(map(len, ids))
        if run:
            best = max(best, tokens / (time.perf_counter() - begin))
    return best


def cpu_seconds() -> dict[str, float]:
    """Processor time so far of each process of the service."""
    found = {}
    for kind, pid in processes(os.getpid()).items():
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        found[kind] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


@contextmanager
def service(options: argparse.Namespace) -> Iterator[int]:
    """The model behind HTTP, in a cluster of this process. Yields its port."""
    entry = {
        "name": "big", "path": str(options.target.resolve()), "amp": options.amp, "backend": options.backend,
        "batch_size": options.batch_size, "n_positions": options.n_positions, "k": options.k,
        **({"draft": options.draft} if options.draft else {}),
    }  # fmt: skip
    entry = {key: value for key, value in entry.items() if value is not None}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    machine = host_cpus()
    environment.prepare_new_cluster()
    ray.init(
        address="local", log_to_driver=False, num_cpus=2, resources={"neuron_cores": machine.cores},
        include_dashboard=False,
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        groups = plan_groups(models_of([entry], folder=Path(), where="benchmark"), machine)
        options.threads = dict(groups[0].plan.placements[0].env)["OMP_NUM_THREADS"]
        settings = ApiSettings(access_log=False, stream_interval_ms=options.interval_ms)
        app = application(groups, FaultPolicy(), settings)
        serve.run(app, name="paceline", route_prefix="/", external_scaler_enabled=True)
        yield port
    finally:
        ray.shutdown()


def row(load: str, answers: Sequence[Answer | None], seconds: float, *, base: float, cpu: dict[str, float]) -> Row:
    """The figures of one load. ``cpu``: seconds that each process took for it."""
    good = [answer for answer in answers if answer is not None]
    tokens = sum(answer.tokens for answer in good)
    firsts = sorted(answer.first_s for answer in good) or [0.0]
    speed = tokens / seconds
    return Row(
        load,
        len(answers),
        len(answers) - len(good),
        round(speed, 1),
        round(base, 1),
        round(speed / base, 3) if base else 0.0,
        (round(statistics.median(firsts), 3), round(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 3)),
        {kind: round(1e6 * spent / max(1, tokens), 1) for kind, spent in cpu.items()},
    )


def measure(options: argparse.Namespace, port: int, prompts: Sequence[str]) -> list[Row]:
    """Every load, each after the engine alone."""
    rows, loads = [], [(f"{count} streams", count, 0.0) for count in options.streams]
    loads += [(f"{rate} a second", 0, rate) for rate in options.rates]
    for name, streams, rate in loads:
        base = 0.0 if options.no_offline else offline(options, batch_size=1 if streams == 1 else options.batch_size)
        before, begin = cpu_seconds(), time.perf_counter()
        if streams:
            run = closed(port, prompts, options.tokens, streams=streams, each=options.each)
        else:
            run = opened(port, prompts, options.tokens, rate=rate, count=options.requests)
        answers = asyncio.run(run)
        seconds, after = time.perf_counter() - begin, cpu_seconds()
        spent = {kind: after[kind] - before[kind] for kind in after if kind in before}
        rows.append(row(name, answers, seconds, base=base, cpu=spent))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", nargs="*", default=[])
    parser.add_argument("--k", default=None)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--n-positions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--each", type=int, default=2, help="requests of each stream in the closed loop")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=32, help="requests of the open loop")
    parser.add_argument("--offline", type=int, default=0, help=argparse.SUPPRESS)  # batch size, in a process of its own
    parser.add_argument("--interval-ms", type=float, default=DEFAULT_STREAM_INTERVAL_MS, help="between messages")
    parser.add_argument("--no-offline", action="store_true", help="measure the service alone; ratios are 0")
    options = parser.parse_args()
    options.threads = ""
    if options.offline:
        print(run_offline(options))
        return
    with service(options) as port:
        asyncio.run(closed(port, PROMPTS, options.tokens, streams=2, each=1))
        rows = measure(options, port, PROMPTS)
    publish({"rows": [asdict(one) for one in rows]})


if __name__ == "__main__":
    main()
