"""How fast a service is, against the same engine without one, in the same run and in turns with it.

    python -m benchmarks.serve --target DIR [--draft DIR | ngram ...] [--k 4 auto plain]
                               [--streams 1 16 64] [--rates 5 15] [--gaps]

A service for each draft length; `plain` has no drafter. Closed loop: so many streams, each of which begins its next
request when the last has ended. Open loop (--rates), with the first draft length: requests begin at random moments, so
many a second, whatever the service does, but never more than 256 at a time. The client runs on the same machine, over
loopback, and takes its share of the processor. Prints JSON on its last line, as "rows":
tokens_per_s      of all streams together
offline           the same prompts by the engine in a process of its own, with as many threads as the service's: median
                  of three runs, after one in which graphs are made. One prompt at a time for one stream, else as many
                  as the batch size. 0 in the open loop
ratio             tokens_per_s / offline; 0 in the open loop, where the load says how many tokens there are
first_token_s     median and 99th percentile, from sending the request
cpu_us_per_token  processor time of each process of the service
And as "gaps" (--gaps) how long running streams wait while long prompts are read (`Gaps`), by a
service that sends a message for every round, with the most positions that the target has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ray import serve

from benchmarks.common import publish
from benchmarks.service_processes import cluster, processes
from paceline import AutoDecoder, SpeculativeGenerator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.instances import host_cpus
from paceline.placement.planning.model_specs import models_of
from paceline.serving.ray_app import ListeningSocket, application
from paceline.serving.settings import DEFAULT_STREAM_INTERVAL_MS, ApiSettings
from paceline.text.tokenizer import load_tokenizer

MOST = 256  # requests at a time, in the open loop
_FEW = 3  # streams that run beside a long prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Seconds since it was sent; ``gap_s``: the longest between two of its messages."""

    tokens: int
    first_s: float
    seconds: float
    gap_s: float
    prompt_tokens: int


async def ask(port: int, prompt: str, tokens: int, seed: int) -> Answer | None:
    """One streamed request; None: it failed."""
    body = json.dumps(
        {"model": "big", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": seed, "stream": True,
         "stream_options": {"include_usage": True}, "ignore_eos": True}
    ).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    begin, first, last, gap, tail = time.perf_counter(), 0.0, 0.0, 0.0, b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        while data := await reader.read(1 << 16):
            if b"data: " in data:
                now = time.perf_counter()
                gap = max(gap, now - last) if first else 0.0
                first, last = first or now - begin, now
            tail = (tail + data)[-4096:]
        writer.close()
        lines = [line[6:] for line in tail.splitlines() if line.startswith(b"data: {")]
        usage = json.loads(lines[-1])["usage"]
        count, read = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return Answer(count, first, time.perf_counter() - begin, gap, read)


async def closed(port: int, prompts: Sequence[str], tokens: int, *, streams: int, each: int) -> list[Answer | None]:
    async def one(stream: int) -> list[Answer | None]:
        return [
            await ask(port, prompts[(stream + number) % len(prompts)], tokens, stream * each + number)
            for number in range(each)
        ]

    return [answer for answers in await asyncio.gather(*map(one, range(streams))) for answer in answers]


async def opened(port: int, prompts: Sequence[str], tokens: int, *, rate: float, count: int) -> list[Answer | None]:
    """``count`` requests, ``rate`` a second in the mean."""
    draw, places, running = random.Random(0), asyncio.Semaphore(MOST), list[asyncio.Task[Answer | None]]()

    async def one(number: int) -> Answer | None:
        async with places:
            return await ask(port, prompts[number % len(prompts)], tokens, number)

    for number in range(count):
        running.append(asyncio.create_task(one(number)))
        await asyncio.sleep(draw.expovariate(rate))
    return list(await asyncio.gather(*running))


@dataclass(frozen=True, slots=True)
class Gaps:
    """How long running streams wait while long prompts are read. Seconds; of gaps the longest between two messages.

    prompt_tokens  of a long prompt
    alone_s        from sending one to its first token, while nothing else runs
    quiet_s        gap while no prompt is read
    beside_s       gap while one long prompt after the other is read
    prompts        how many were, meanwhile
    """

    prompt_tokens: int
    alone_s: float
    quiet_s: float
    beside_s: float
    prompts: int


async def gaps(port: int, prompts: Sequence[str], long: str, tokens: int) -> Gaps:
    """Measure the waits with a few streams of ``tokens`` tokens."""

    def longest(answers: Sequence[Answer | None]) -> float:
        assert all(answers), "a request failed"
        return max(answer.gap_s for answer in answers if answer is not None)

    alone = [await ask(port, f"# {number}\n{long}", 1, number) for number in range(5)]
    quiet = await closed(port, prompts, tokens, streams=_FEW, each=2)
    running, read = asyncio.create_task(closed(port, prompts, tokens, streams=_FEW, each=2)), 0
    while not running.done():
        answer = await ask(port, f"# again {read}\n{long}", 1, read)
        assert answer is not None, "a request failed"
        read += 1
    firsts = sorted((answer.first_s, answer.prompt_tokens) for answer in alone if answer is not None)
    return Gaps(firsts[0][1], firsts[0][0], longest(quiet), longest(await running), read)


PLAIN = "plain"
PROMPTS = ["def main", "class Queue:", "import os", "# sorts a list\n", "def test_", "for line in"]
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Row:
    """One load; see the module. ``k``: the draft length. ``failed``: requests that were not answered to their end."""

    k: str
    load: str
    requests: int
    failed: int
    tokens_per_s: float
    offline: float
    ratio: float
    first_token_s: tuple[float, float]
    cpu_us_per_token: dict[str, float]


def offline(options: argparse.Namespace, *, k: str, batch_size: int) -> float:
    """Tokens per second of the engine in a separate process, over as many prompts as it has slots."""
    variables = {"OMP_NUM_THREADS": options.threads} if options.threads else {}
    asked = [sys.executable, "-m", "benchmarks.serve", *sys.argv[1:], "--k", k, "--offline", str(batch_size)]
    done = subprocess.run(asked, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True)
    return float(done.stdout.split()[-1])


def run_offline(options: argparse.Namespace) -> float:
    """The same, in this process."""
    (k,), batch_size = options.k, options.offline
    target = AutoDecoder.from_pretrained(
        options.target, batch_size=batch_size, n_positions=options.n_positions, amp=options.amp, backend=options.backend
    )
    draft = None if k == PLAIN or not options.draft else options.draft
    depth = {"k": k} if draft else {}
    generator = SpeculativeGenerator(draft[0] if draft and len(draft) == 1 else draft, target, **depth)
    tokenizer = load_tokenizer(options.target)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    rounds = [[row] for row in ids] if batch_size == 1 else [[ids[row % len(ids)] for row in range(batch_size)]]
    generator.compile()
    speeds = []
    for run in range(4):
        begin, tokens = time.perf_counter(), 0
        for prompts in rounds:
            result = generator.sample(prompts, max_new_tokens=options.tokens, ignore_eos=True, return_dict=True)
            tokens += sum(result.lengths) - sum(map(len, prompts))
        if run:
            speeds.append(tokens / (time.perf_counter() - begin))
    return statistics.median(speeds)


def cpu_seconds() -> dict[str, float]:
    """Processor time so far of each process of the service."""
    found = {}
    for kind, pid in processes(os.getpid()).items():
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        found[kind] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


@contextmanager
def service(options: argparse.Namespace, k: str, *, interval_ms: float) -> Iterator[int]:
    """Serve the model by HTTP in a cluster of this process. Yields its port."""
    drafting = {"draft": options.draft, "k": k} if options.draft and k != PLAIN else {}
    entry = {
        "name": "big", "path": str(options.target.resolve()), "amp": options.amp, "backend": options.backend,
        "batch_size": options.batch_size, "n_positions": options.n_positions, **drafting,
    }  # fmt: skip
    groups = plan_groups(models_of([entry], folder=Path(), where="benchmark"), host_cpus())
    with cluster(), ListeningSocket("127.0.0.1", 0) as listening:
        options.threads = dict(groups[0].plan.placements[0].env)["OMP_NUM_THREADS"]
        settings = ApiSettings(access_log=False, stream_interval_ms=interval_ms)
        serve.start(proxy_location="Disabled")
        app = application(groups, FaultPolicy(), settings, handover=listening.handover)
        serve.run(app, name="paceline", route_prefix="/", external_scaler_enabled=True)
        yield listening.port


def row(
    k: str, load: str, answers: Sequence[Answer | None], *, seconds: float, base: float, cpu: dict[str, float]
) -> Row:
    """The figures of one load. ``cpu``: seconds that each process took for it."""
    good = [answer for answer in answers if answer is not None]
    tokens = sum(answer.tokens for answer in good)
    firsts = sorted(answer.first_s for answer in good) or [0.0]
    speed = tokens / seconds
    return Row(
        k,
        load,
        len(answers),
        len(answers) - len(good),
        round(speed, 1),
        round(base, 1),
        round(speed / base, 3) if base else 0.0,
        (round(statistics.median(firsts), 3), round(firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))], 3)),
        {kind: round(1e6 * spent / max(1, tokens), 1) for kind, spent in cpu.items()},
    )


def measure(options: argparse.Namespace, k: str, port: int) -> Iterator[Row]:
    """Every load of one service, in turns with the bare engine."""
    alone: dict[int, float] = {}
    loads = [(f"{count} stream{'s' * (count > 1)}", count, 0.0) for count in options.streams]
    loads += [(f"{rate:g} requests a second", 0, rate) for rate in options.rates if k == options.k[0]]
    for name, streams, rate in loads:
        batch_size = 1 if streams == 1 else options.batch_size
        if streams and not options.no_offline and batch_size not in alone:
            alone[batch_size] = offline(options, k=k, batch_size=batch_size)
        before, begin = cpu_seconds(), time.perf_counter()
        if streams:
            each = max(options.each, -(-options.at_least // streams))
            run = closed(port, PROMPTS, options.tokens, streams=streams, each=each)
        else:
            run = opened(port, PROMPTS, options.tokens, rate=rate, count=options.requests)
        answers = asyncio.run(run)
        seconds, after = time.perf_counter() - begin, cpu_seconds()
        spent = {kind: after[kind] - before[kind] for kind in after if kind in before}
        base = alone.get(batch_size, 0.0) if streams else 0.0
        yield row(k, name, answers, seconds=seconds, base=base, cpu=spent)


def measure_gaps(options: argparse.Namespace) -> Gaps:
    positions = positions_of(options.target)
    options = argparse.Namespace(**{**vars(options), "n_positions": positions})
    tokenizer = load_tokenizer(options.target)
    text = "".join(Path(__file__).read_text(encoding="utf-8") for _ in range(4))
    room = positions - 64  # for what is written before it, and after it
    long = tokenizer.decode(list(tokenizer.encode(text))[:room])
    with service(options, options.k[0], interval_ms=0.0) as port:
        asyncio.run(closed(port, PROMPTS, options.tokens, streams=2, each=1))
        return asyncio.run(gaps(port, PROMPTS, long, positions - 64))


def positions_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", nargs="*", default=[])
    parser.add_argument("--k", nargs="*", default=["auto"], help=f"draft lengths; auto; or {PLAIN}, no drafter")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--n-positions", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--each", type=int, default=2, help="requests of each stream in the closed loop")
    parser.add_argument("--at-least", type=int, default=24, help="requests of all streams of a closed loop together")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second in open loops")
    parser.add_argument("--requests", type=int, default=64, help="requests of an open loop")
    parser.add_argument("--gaps", action="store_true", help="measure gaps beside long prompts, too")
    parser.add_argument("--offline", type=int, default=0, help=argparse.SUPPRESS)  # batch size, in a process of its own
    parser.add_argument("--interval-ms", type=float, default=DEFAULT_STREAM_INTERVAL_MS, help="between messages")
    parser.add_argument("--no-offline", action="store_true", help="measure the service alone; ratios are 0")
    options = parser.parse_args()
    options.threads = ""
    if options.offline:
        print(run_offline(options))
        return
    rows = []
    for k in options.k:
        with service(options, k, interval_ms=options.interval_ms) as port:
            asyncio.run(closed(port, PROMPTS, options.tokens, streams=2, each=1))
            for one in measure(options, k, port):
                print(one, flush=True)
                rows.append(asdict(one))
    publish({"rows": rows, **({"gaps": asdict(measure_gaps(options))} if options.gaps else {})})


if __name__ == "__main__":
    main()
