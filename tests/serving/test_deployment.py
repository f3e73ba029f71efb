"""Calls by ids, as `placement.launch` makes them, over model servers of this process; on Ray it is `test_ray`'s."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pickle import dumps
from typing import Any

import pytest

from paceline.core.errors import CheckpointError, PromptError, QueueFullError, TargetLostError
from paceline.engine.request import SamplingParams
from paceline.outputs import RequestOutput
from paceline.placement import INSTANCES, plan
from paceline.serving.answer import read_outputs
from paceline.serving.deployment import Stream, groups_of
from paceline.serving.errors import RefusedError
from paceline.serving.model_server import ModelServer, NoTokenizer
from paceline.serving.router import Failed, Item, RequestContext, StreamChunk, StreamStart, TokenRequest
from paceline.workers.shared_engine import SharedEngine
from tests.placement.wishes import model
from tests.serving.edge import card
from tests.serving.test_edge_engine import generator, items, server
from tests.waiting import in_loop

PROMPTS = ((3, 1, 4, 1, 5), (9, 2))


def request(**params: Any) -> TokenRequest:
    return TokenRequest("m", PROMPTS, SamplingParams(**{"max_new_tokens": 30, "seed": 5, "do_sample": True} | params))


def texts(chunks: Sequence[StreamChunk]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        for output in read_outputs(chunk.data):
            found[output.index] += output.tokens
    return found


@in_loop
async def test_outputs_equal_the_generators_and_continue_at_another_server() -> None:
    asked = request()
    alone = generator().sample([list(prompt) for prompt in PROMPTS], params=asked.params, return_dict=True)
    ends = zip(alone.sequences, alone.lengths, PROMPTS, strict=True)  # type: ignore[union-attr]
    expected = {index: row[len(prompt) : size].tolist() for index, (row, size, prompt) in enumerate(ends)}
    first, second = server(), server()
    chunks = await items(first, asked)
    assert texts(chunks) == expected and chunks[-1].sent == tuple(map(len, expected.values()))
    reasons = [one.finish_reason for chunk in chunks for one in read_outputs(chunk.data) if one.finish_reason]
    assert len(reasons) == 2
    for cut in range(1, len(chunks)):
        rest = await items(second, asked, chunks[cut - 1].sent)
        assert texts([*chunks[:cut], *rest]) == expected


def test_scores_of_sent_tokens_are_omitted() -> None:
    made, asked = server(), request(output_scores=True)
    chunks, rest = (asyncio.run(items(made, asked, sent)) for sent in ((), (7, 3)))
    scores = [[one.logprobs for chunk in part for one in read_outputs(chunk.data)] for part in (chunks, rest)]
    assert sum(map(len, scores[0])) - sum(map(len, scores[1])) == 10


@in_loop
async def test_a_model_without_a_tokenizer_accepts_only_ids() -> None:
    made = generator()
    bare = ModelServer(NoTokenizer(CheckpointError("there is none")), SharedEngine(made), made.limits, card=card())
    assert await items(bare, request())
    *_, failed = [item async for item in bare.stream(request(stop_strings="x"), RequestContext.new())]
    assert isinstance(failed, Failed) and isinstance(failed.cause, CheckpointError)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def stream(loop: asyncio.AbstractEventLoop, *said: Item, waits: bool = False) -> Stream:
    async def answer() -> AsyncIterator[Item]:
        for item in said:
            yield item
        if waits:
            await asyncio.sleep(3600)

    return Stream(answer(), loop, 2)


def chunk(index: int, *tokens: int, last: bool = False) -> StreamChunk:
    return StreamChunk(dumps(RequestOutput(index, tokens, 0)), (), last)


def test_a_caller_gets_outputs_and_the_original_error(loop: asyncio.AbstractEventLoop) -> None:
    whole = stream(loop, StreamStart(7), chunk(0, 1, 2), chunk(1, 3, last=True))
    assert [(one.index, one.tokens) for one in whole] == [(0, (1, 2)), (1, (3,))]
    prompt = PromptError("of the vocabulary")
    for failed, kind in (
        (Failed(RefusedError(400, "no"), cause=prompt), PromptError),
        (Failed(RefusedError(429, "full", code="queue_full")), QueueFullError),
    ):
        with pytest.raises(kind):
            next(stream(loop, failed))
    lost = stream(loop, StreamStart(7), chunk(1, 4, 5), Failed(RefusedError(503, "it was lost"), lost=True))
    with pytest.raises(TargetLostError, match="it was lost") as caught:
        list(lost)
    assert caught.value.tokens == ((), (4, 5))


def test_a_stream_is_closed_while_another_thread_waits_for_it(loop: asyncio.AbstractEventLoop) -> None:
    waiting = stream(loop, chunk(0, 1), waits=True)
    assert next(waiting).tokens == (1,)
    rest: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: rest.extend(waiting))
    thread.start()
    while waiting._step is None or waiting._step.done():
        pass
    waiting.close()
    thread.join(60)
    assert not thread.is_alive() and not rest


def test_each_target_of_a_plan_is_a_group_with_its_draft() -> None:
    targets = [model("a", 4, replicas=2), model("b", 4)]
    made = plan([*targets, model("d", 1, draft_of=("a", "b"), replicas=3)], INSTANCES["inf2.48xlarge"])
    groups = groups_of(made)
    assert {group.name: [one.label for one in group.plan.placements] for group in groups} == {
        "a": ["a", "d"], "a.1": ["a.1", "d.1"], "b": ["b", "d.2"],
    }  # fmt: skip
    assert all(group.replicas == 1 for group in groups)
