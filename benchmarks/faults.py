"""What clients see when processes of a service die or stop: every one of them, and with ``--pairs`` every two of them.

    python benchmarks/faults.py --target DIR --draft DIR [--pairs] [--markdown]

For each fault, streams at temperature 0.8 are begun, the process is killed or stopped (SIGKILL, SIGSTOP) in the middle,
and each text is compared with that of the same request without a fault. Prints JSON on its last line:
equal      streams with the same text
typed      streams that ended with an error object
broken     streams whose connection broke (possible only where proxy or ingress died), or that were neither
pause_s    longest time between two pieces of a stream
whole_s    from the fault until every model is ready and a new request is answered
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Barrier
from urllib.request import urlopen

import openai
import ray
from ray import serve

from benchmarks.service_processes import processes
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.host import environment
from paceline.placement.planning.detect import host_cpus
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.serving.app import application

KINDS = ("model:big", "draft", "ingress", "proxy", "controller", "allocator")
_GIVE_UP_S = 180.0
_BETWEEN_S = 2.0  # between the two faults of a pair


@dataclass(frozen=True, slots=True)
class Stream:
    """How one stream ended. ``error``: "", "typed" or "broken"."""

    text: str
    error: str
    pause_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row of the table; see the module."""

    fault: str
    streams: int
    equal: int
    typed: int
    broken: int
    pause_s: float
    whole_s: float


class Client:
    """Streams of one service."""

    def __init__(self, url: str, *, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_GIVE_UP_S)

    def stream(self, seed: int, begun: Barrier | None = None) -> Stream:
        """One stream to its end. ``begun``: passed when it has its first text."""
        parts, last, pause, error = list[str](), time.monotonic(), 0.0, ""
        try:
            for chunk in self._openai.completions.create(
                model="big", prompt="def f(a, b):", max_tokens=self._tokens, temperature=0.8, seed=seed, stream=True
            ):
                now = time.monotonic()
                pause, last = max(pause, now - last if parts else 0.0), now
                parts += [choice.text for choice in chunk.choices]
                if begun is not None:
                    waiting, begun = begun, None
                    waiting.wait(_GIVE_UP_S)
        except (openai.APIConnectionError, OSError):
            error = "broken"
        except openai.APIError:
            error = "typed"
        if begun is not None:
            begun.abort()
        return Stream("".join(parts), error, pause)

    def wait_until_whole(self) -> float:
        """Seconds until everything answers, without a gap of a second."""
        begin, good = time.monotonic(), 0
        while good < 3:
            if time.monotonic() - begin > _GIVE_UP_S:
                return float("inf")
            try:
                ready = urlopen(f"{self._url}/health/ready", timeout=3).status == 200
                good = good + 1 if ready and not self.short().error else 0
            except (OSError, HTTPException):
                good = 0
            time.sleep(0.3)
        return time.monotonic() - begin

    def short(self) -> Stream:
        """One new request."""
        with suppress(openai.APIError):
            self._openai.with_options(timeout=20).completions.create(
                model="big", prompt="x", max_tokens=2, temperature=0
            )
            return Stream("", "", 0.0)
        return Stream("", "typed", 0.0)


def run(client: Client, victims: Sequence[str], number: int, wanted: Sequence[str]) -> Outcome:
    """One fault under as many streams as texts are wanted."""
    begun = Barrier(len(wanted) + 1)
    with ThreadPoolExecutor(len(wanted)) as pool:
        streams = [pool.submit(client.stream, seed, begun) for seed in range(len(wanted))]
        begun.wait(_GIVE_UP_S)
        pids = [processes(os.getpid())[victim] for victim in victims]
        begin = time.monotonic()
        for place, pid in enumerate(pids):
            time.sleep(_BETWEEN_S if place else 0)
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        whole = client.wait_until_whole()
        whole = time.monotonic() - begin if whole != float("inf") else whole
        ended = [stream.result(_GIVE_UP_S) for stream in streams]
    for pid in pids:  # one that was stopped, and that nobody has replaced, goes on
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    equal = sum(stream.text == text and not stream.error for stream, text in zip(ended, wanted, strict=True))
    typed = sum(stream.error == "typed" for stream in ended)
    name = f"{'kill -9' if number == signal.SIGKILL else 'SIGSTOP'} {' + '.join(victims)}"
    pause = max(stream.pause_s for stream in ended)
    return Outcome(name, len(ended), equal, typed, len(ended) - equal - typed, round(pause, 1), round(whole, 1))


@contextmanager
def service(target: Path, draft: Path, *, backend: str) -> Iterator[str]:
    """A model with a draft in its own process, served from a cluster of this process. Yields its address."""
    shape = {"amp": "f32", "backend": backend, "batch_size": 8, "n_positions": 128}
    entries = [
        {"name": "big", "path": str(target.resolve()), **shape},
        {"name": "small", "path": str(draft.resolve()), "draft_of": "big", "k": 3, **shape},
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machine = host_cpus()
    environment.end_silent_replicas()
    ray.init(
        address="local", log_to_driver=False, num_cpus=2, resources={"neuron_cores": machine.cores},
        include_dashboard=False,
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        groups = plan_groups(models_of(entries, folder=Path(), where="benchmark"), machine)
        serve.run(
            application(groups, FaultPolicy(startup_timeout_s=170)),
            name="paceline",
            route_prefix="/",
            external_scaler_enabled=True,
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows for a page."""
    lines = [
        "| fault | same text | error object | broken | longest pause, s | whole again, s |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        of = f"{one.equal} of {one.streams}"
        lines.append(f"| {one.fault} | {of} | {one.typed} | {one.broken} | {one.pause_s} | {one.whole_s} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=110)
    parser.add_argument("--only", nargs="*", default=list(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--pairs", action="store_true", help="every two of them, too")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page first")
    options = parser.parse_args()
    victims = [(kind,) for kind in options.only]
    victims += list(itertools.combinations(options.only, 2)) if options.pairs else []
    outcomes = []
    with service(options.target, options.draft, backend=options.backend) as url:
        client = Client(url, tokens=options.tokens)
        client.wait_until_whole()
        wanted = [client.stream(seed).text for seed in range(options.streams)]
        for number, names in itertools.product((signal.SIGKILL, signal.SIGSTOP), victims):
            outcomes.append(run(client, names, number, wanted))
            print(outcomes[-1], flush=True)
    if options.markdown:
        print(table(outcomes))
    print(json.dumps({"faults": [asdict(one) for one in outcomes]}))


if __name__ == "__main__":
    main()
