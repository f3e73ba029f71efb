"""Clients of a service that do next to nothing: one streamed request, and many of them in closed and open loops.

They run on the machine of the service, over loopback. Not here: services, and what is made of the answers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

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
    """``each`` requests of each stream, one behind the other."""

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
    """Measure that, with a few streams of so many tokens."""

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
