"""A service that has answered many requests is as large as one that has answered some: nothing of a request stays.

Counts, not a process' memory, so that it takes seconds; `benchmarks/faults.py --soak` reads that of real processes.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest

import paceline
from paceline.workers.shared_engine import SharedEngine
from tests.serving.edge import running
from tests.serving.test_edge_engine import SCHEMA, application, generator
from tests.waiting import until

FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ASKED: list[tuple[str, dict[str, object]]] = [
    ("completions", {"prompt": "abc", "stream": True, "ignore_eos": True, "max_tokens": 40}),
    ("completions", {"prompt": ["abc", "fox"], "n": 2, "logprobs": 2}),
    ("completions", {"prompt": "abc", "stream": True, "ignore_eos": True, "max_tokens": 400}),  # its client leaves
    ("chat/completions", {**CHAT, "response_format": FORM, "max_tokens": 60}),
    ("chat/completions", {**CHAT, "stream": True, "max_tokens": 30, "stop": ["qq"]}),
    ("chat/completions", {**CHAT, "temperature": -1}),  # is refused
    ("responses", {"input": "abc", "max_output_tokens": 20, "stream": True}),
]
LEAVES = 2  # its place in the list
SLOTS = 4  # each of which may hold what it had last
KEPT_BYTES = 32_768  # that 98 requests may leave, such as the tickets of those that were given up early


@pytest.mark.full
def test_finished_requests_leave_nothing() -> None:
    engine = SharedEngine(generator())
    app = application(engine, api_keys=("k",), max_requests_per_key=50)
    with running(app) as address, httpx.Client(base_url=address, timeout=60) as client:

        def ask(place: int) -> int:
            kind = place % len(ASKED)
            path, fields = ASKED[kind]
            body = {"model": "m", "seed": place % 5, **fields}
            with client.stream("POST", f"/v1/{path}", json=body, headers={"authorization": "Bearer k"}) as response:
                if kind == LEAVES:
                    next(response.iter_raw())
                else:
                    response.read()
            return response.status_code

        def wave(count: int) -> Counter[int]:
            with ThreadPoolExecutor(8) as pool:
                statuses = Counter(pool.map(ask, range(count)))
            until(lambda: not engine._calls)
            engine.take_timings()  # as a replica does, every second
            return statuses

        wave(28)
        tracemalloc.start()
        try:
            wave(28)
            before, first = living(), taken()
            statuses = wave(98)
            until(lambda: max((living() - before).values(), default=0) <= SLOTS)
            last = taken()
        finally:
            tracemalloc.stop()
    assert statuses == {200: 84, 400: 14}
    assert last - first < KEPT_BYTES


def living() -> Counter[str]:
    """Objects of ours, and tasks of event loops, by class."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    ours = [kind for kind in kinds if kind is asyncio.Task or str(kind.__module__).startswith("paceline")]
    return Counter(kind.__qualname__ for kind in ours)


def taken() -> int:
    """Bytes that lines of ours have allocated and that are still held."""
    folder = Path(str(paceline.__file__)).parent.parent
    ours = tracemalloc.Filter(True, f"{folder}/*")
    apart = tracemalloc.Filter(False, f"{folder}/.venv/*"), tracemalloc.Filter(False, f"{folder}/tests/*")
    statistics = tracemalloc.take_snapshot().filter_traces([ours, *apart]).statistics("filename")
    return sum(one.size for one in statistics)
