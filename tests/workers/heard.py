"""Updates that a caller of a shared engine receives while it waits in a thread; no tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import closing
from queue import SimpleQueue

from paceline.engine.request import Request, SamplingParams
from paceline.outputs import RequestOutput
from paceline.workers.calls import Call, CallUpdate
from paceline.workers.shared_engine import AsyncEngine, SharedEngine


def outputs_of(engine: SharedEngine, ticket: str, requests: Sequence[Request]) -> Generator[RequestOutput, None, None]:
    """Outputs of the requests of one call, as they come."""
    updates: SimpleQueue[list[CallUpdate]] = SimpleQueue()
    engine.submit(Call(ticket, requests), updates.put)
    try:
        while True:
            for update in updates.get():
                yield from update.outputs
                if update.error is not None:
                    raise update.error
                if update.ended:
                    return
    finally:
        engine.end(ticket)


def asked(
    engine: SharedEngine, ticket: str, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Generator[RequestOutput, None, None]:
    """The same of prompts."""
    return outputs_of(engine, ticket, Request.batch(prompts, params, engine.generator.limits))


async def updates_of(engine: AsyncEngine, call: Call) -> AsyncGenerator[CallUpdate, None]:
    """Updates of a call, as they come."""
    with closing(engine.begin(call)) as begun:
        while (update := await begun.next()) is not None:
            yield update
