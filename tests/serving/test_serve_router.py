"""The router over Ray Serve: whatever a replica does, the client gets its whole answer or an error object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from paceline.core.errors import WorkerError
from paceline.serving import serve_router
from paceline.serving.errors import RefusedError
from paceline.serving.openai.requests import CompletionRequest, TokenizeRequest
from paceline.serving.router import Failed, Item, ModelCard, RequestContext, StreamChunk, StreamStart
from paceline.serving.serve_router import ServeRouter
from tests.waiting import in_loop

Attempt = Callable[[Sequence[int]], list[Item | Exception]]
TOKENS = [b"a", b"b", b"c", b"d"]


class Handle:
    """A deployment's handle; ``attempts`` say, one after the other, what the replica does that is asked."""

    def __init__(self, *attempts: Attempt) -> None:
        self._attempts, self.skips, self.cancelled = list(attempts), list[tuple[int, ...]](), 0
        self.cards, self.readers = list[ModelCard](), list[str]()
        self.stream, self.kind = self, Items

    def options(self, **_: object) -> Handle:
        return self

    def remote(self, _: object, context: RequestContext, skip: tuple[int, ...]) -> Items:
        self.skips.append(skip)
        self.readers.append(context.reader)
        return self.kind(self, (self._attempts.pop(0) if self._attempts[1:] else self._attempts[0])(skip))

    def broadcast(self, method: str, *_: object) -> Any:
        if not self.cards:
            raise RuntimeError(f"nobody answers {method}")
        return self

    async def results_async(self, **_: object) -> list[Any]:
        return self.cards


class Items:
    def __init__(self, handle: Handle, items: list[Item | Exception]) -> None:
        self._handle, self._items = handle, items

    async def __aiter__(self) -> AsyncIterator[Item]:
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        self._handle.cancelled += 1


def answers(upto: int, end: Exception | Failed | None = None) -> Attempt:
    """Tokens up to a place, without those to skip, and how it ends."""

    def attempt(skip: Sequence[int]) -> list[Item | Exception]:
        first = skip[0] if skip else 0
        chunks = [StreamChunk(TOKENS[at], (at + 1,), last=at == len(TOKENS) - 1) for at in range(first, upto)]
        return [StreamStart(3), *chunks, *([] if end is None else [end])]

    return attempt


def ask(handle: Handle, monkeypatch: pytest.MonkeyPatch, model: str = "m", **options: Any) -> list[Item]:
    monkeypatch.setattr(serve_router, "_PAUSE_S", 0.0)

    async def run() -> list[Item]:
        router = ServeRouter({"m": handle}, reader="me", **options)
        request = CompletionRequest(model=model, prompt="x", seed=1)
        return [item async for item in router.stream(request, RequestContext.new())]

    return asyncio.run(asyncio.wait_for(run(), 60))


LOSSES = [ActorDiedError(), DeploymentUnavailableError(None), Failed(RefusedError(503, "a rank is gone"), lost=True)]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("at", range(4))
def test_a_response_continues_at_another_replica(loss: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(answers(at, loss), answers(0, loss), answers(4))
    items = ask(handle, monkeypatch)
    assert [type(item) for item in items] == [StreamStart] + [StreamChunk] * 4, "accepted once"
    assert b"".join(item.data for item in items if isinstance(item, StreamChunk)) == b"abcd"
    assert handle.skips == [(), (at,) if at else (), (at,) if at else ()] and set(handle.readers) == {"me"}
    assert handle.cancelled == (0 if isinstance(loss, Failed) else 2), "nothing goes on behind a last item"


def test_batched_items_of_a_message_are_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    def together(skip: Sequence[int]) -> list[Any]:
        accepted, first, *rest = answers(4)(skip)
        return [(accepted, first), *rest[:1], ActorDiedError()] if not skip else [(accepted, first, *rest)]

    handle = Handle(together)
    items = ask(handle, monkeypatch)
    assert [type(item) for item in items] == [StreamStart] + [StreamChunk] * 4
    assert b"".join(item.data for item in items if isinstance(item, StreamChunk)) == b"abcd"
    assert handle.skips == [(), (2,)]


@in_loop
async def test_a_disconnect_ends_the_running_call() -> None:
    handle = Handle(answers(4))
    router = ServeRouter({"m": handle})
    items = router.stream(CompletionRequest(model="m", prompt="x", seed=1), RequestContext.new())
    assert isinstance(await anext(items), StreamStart) and isinstance(await anext(items), StreamChunk)
    await items.aclose()  # type: ignore[attr-defined]
    assert handle.cancelled == 1


def test_a_model_without_a_replica_ends_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve waits for one for as long as it takes, without a word."""

    class Waits(Items):
        async def __aiter__(self) -> AsyncIterator[Item]:
            await asyncio.sleep(60)
            yield StreamStart(0)

    handle = Handle(answers(4))
    handle.kind = Waits
    (failed,) = ask(handle, monkeypatch, recovery_s=0.05)
    assert isinstance(failed, Failed) and (failed.error.status, failed.error.code) == (503, "model_unavailable")
    assert failed.error.retry_after_s


def test_a_model_that_does_not_recover_ends_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = answers(0, ActorDiedError())
    *_, last = ask(Handle(answers(2, ActorDiedError()), gone), monkeypatch, resume_s=0.01)
    assert isinstance(last, Failed) and (last.error.status, last.error.code) == (503, "model_unavailable")
    assert last.error.retry_after_s, "clients are told to ask again"


FULL = BackPressureError(num_queued_requests=9, max_queued_requests=9)


@pytest.mark.parametrize(
    "full", [FULL, Failed(RefusedError(429, "all wait", code="queue_full"))], ids=["serve", "engine"]
)
def test_a_started_response_waits_for_a_full_queue(full: Exception | Failed, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(answers(2, ActorDiedError()), lambda _: [full], answers(4))
    items = ask(handle, monkeypatch, resume_s=60.0)
    assert b"".join(item.data for item in items if isinstance(item, StreamChunk)) == b"abcd"
    assert handle.skips == [(), (2,), (2,)]


def test_a_failed_request_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Failed(RefusedError(400, "too long"))
    handle = Handle(answers(1, failed))
    assert ask(handle, monkeypatch)[-1] is failed and len(handle.skips) == 1


def test_a_full_queue_and_an_unknown_model_have_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    (failed,) = ask(Handle(lambda _: [FULL]), monkeypatch)
    assert isinstance(failed, Failed) and failed.error.status == 429 and failed.error.retry_after_s
    (unknown,) = ask(Handle(), monkeypatch, model="other")
    assert isinstance(unknown, Failed) and unknown.error.status == 404


def test_tokenizer_errors_cross_processes_without_rays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(Handle):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self._error, self.tokenize = error, self

        async def remote(self, *_: object) -> object:  # type: ignore[override]
            raise self._error

    async def tokenize(error: Exception) -> None:
        request = TokenizeRequest(model="m", prompt="x")
        await ServeRouter({"m": Refuses(error)}).tokenize(request)

    refused = RayTaskError("tokenize", "its traceback", RefusedError(400, "no template")).as_instanceof_cause()
    with pytest.raises(RefusedError, match="no template") as caught:
        asyncio.run(tokenize(refused))
    assert caught.value.status == 400
    with pytest.raises(RefusedError) as caught:
        asyncio.run(tokenize(ActorUnavailableError("10.0.0.7 pid=12", None)))
    assert caught.value.status == 503 and "10.0.0.7" not in caught.value.message


@in_loop
async def test_a_model_without_a_responding_replica_is_neither_listed_nor_healthy() -> None:
    router = ServeRouter({"m": Handle()})
    health = await router.health()
    assert not await router.models() and not health.ready and health.models == {"m": "loading"}


@in_loop
async def test_health_is_current_and_the_model_list_is_cached() -> None:
    handle = Handle()
    handle.cards = [ModelCard("m", 1, max_model_len=8)]
    router = ServeRouter({"m": handle})
    assert (await router.health()).ready and await router.models()
    handle.cards = []
    assert await router.models(), "asked a moment ago"
    assert not (await router.health()).ready
    assert not await router.models(), "and what was found out meanwhile is known"


def test_concurrent_health_checks_are_merged() -> None:
    async def look() -> int:
        asked = 0

        class Counts(Handle):
            async def results_async(self, **_: object) -> list[Any]:
                nonlocal asked
                asked += 1
                await asyncio.sleep(0.01)
                return self.cards

        handle = Counts()
        handle.cards = [ModelCard("m", 1, max_model_len=8)]
        router = ServeRouter({"m": handle})
        await asyncio.gather(*(router.health() for _ in range(9)))
        return asked

    assert asyncio.run(look()) <= 2


@pytest.mark.parametrize("decides", [None, RefusedError(503, "no node has room"), WorkerError("nobody decides")])
def test_the_lifecycle_is_called_without_a_replica(decides: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lifecycle loads the model, or says why not; without a decision the model may recover."""
    monkeypatch.setattr(serve_router, "_FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(serve_router, "_LOOK_S", 0.01)
    there = asyncio.Event()

    class Late(Items):
        async def __aiter__(self) -> AsyncIterator[Item]:
            await there.wait()
            async for item in super().__aiter__():
                yield item

    class Asked:
        demands = 0

        async def demand(self, name: str) -> None:
            self.demands += 1
            if self.demands == 3 or decides is None:
                there.set()
            if decides is not None:
                raise decides

    handle = Handle(answers(4))
    handle.kind = Late
    items = ask(handle, monkeypatch, lifecycle=Asked())
    if isinstance(decides, RefusedError):
        assert [one.error for one in items if isinstance(one, Failed)] == [decides]
    else:
        assert b"".join(item.data for item in items if isinstance(item, StreamChunk)) == b"abcd"
