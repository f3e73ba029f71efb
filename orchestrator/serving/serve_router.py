"""A `ModelRouter` over Ray Serve: finds a replica for a request, and asks another one where that is lost.

Tokens are a function of the request, its seed included, so a replica that is told how many tokens of each choice were
sent already leaves those out and sends the rest: the client sees a pause. A request for a model that answers asks
nobody else; where no replica answers, the lifecycle is asked to load the model, or says why not. Not here: HTTP
(`paceline.serving.api`) and what a replica does (`paceline.serving.replica`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from paceline.core.errors import PacelineError
from paceline.serving.lifecycle import Lifecycle, ModelState
from paceline.serving.metrics import merged
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.ray_guard import handle_of
from paceline.serving.refused import QUEUE_FULL, UNAVAILABLE, RefusedError, model_not_found
from paceline.serving.router import Accepted, Chunk, Failed, GenerationRequest, Health, Item, ModelCard, RequestContext

log = logging.getLogger("paceline")

RECOVERY_S = 120.0
"""Seconds in which a model without a replica has to answer, for a request of which nothing was answered yet."""
_PAUSE_S = 0.25  # before asking again, so that Serve learns of the death too
_FIRST_LOOK_S = 0.25  # that a request waits for an answer until the lifecycle is asked
_LOOK_S = 1.0  # until it is asked again; and for which an answer of the models about themselves is good
_ANSWER_S = 2.0  # that such an answer may take
_LOST = (RayActorError, DeploymentUnavailableError)
_ERRORS = (RayError, RayServeException, TimeoutError)

Value = TypeVar("Value")


def deployment_name(model: str) -> str:
    """Of a model's deployment."""
    return f"model-{model}"


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Where a model is served. ``handle``: of its deployment."""

    handle: Any

    @classmethod
    def to(cls, model: str, application: str) -> ModelRoute:
        """To a model of an application of Ray Serve."""
        return cls(handle_of(deployment_name(model), application))


@dataclass(slots=True)
class _Seen:
    """What the replicas of a model said of themselves when they were last asked."""

    cards: list[ModelCard] = field(default_factory=list)
    at: float = float("-inf")  # when that question began
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServeRouter:
    """See the module.

    lifecycle   loads models that are not there; None: all are
    recovery_s  how long a request of which nothing was answered yet waits for a replica
    resume_s    how long an answer that has begun waits for one: as long as a model may take to be loaded
    reader      this process, as replicas know it; see `paceline.serving.ray_guard`
    """

    def __init__(
        self,
        routes: Mapping[str, ModelRoute],
        *,
        lifecycle: Lifecycle | None = None,
        recovery_s: float = RECOVERY_S,
        resume_s: float = RECOVERY_S,
        reader: str = "",
    ) -> None:
        self._routes, self._lifecycle, self._reader = dict(routes), lifecycle, reader
        self._recovery_s, self._resume_s = recovery_s, resume_s
        self._seen = {model: _Seen() for model in routes}

    def put(self, model: str, route: ModelRoute) -> None:
        """A model that was not served until now, or elsewhere."""
        self._routes[model], self._seen[model] = route, _Seen()

    def remove(self, model: str) -> None:
        """A model that is served no more."""
        self._routes.pop(model, None)

    async def models(self) -> Sequence[ModelCard]:
        """See `ModelRouter`: those with a replica that answers."""
        answers = await asyncio.gather(*(self._cards(model) for model in await self._in_memory()))
        return [cards[0] for cards in answers if cards]

    async def cards(self, model: str) -> Sequence[ModelCard]:
        """What the replicas of a model say of themselves now; () where there are none."""
        return await self._cards(model, since=monotonic()) if model in self._routes else ()

    async def health(self) -> Health:
        """See `ModelRouter`. Nothing that a replica said before this question counts, and a model that is not in memory
        as it should be is no reason not to be ready.
        """
        now = monotonic()
        states = None if self._lifecycle is None else await self._lifecycle.states()
        models = await self._in_memory(states)
        answers = await asyncio.gather(*(self._cards(model, since=now) for model in models))
        words = {model: "ready" if cards else "loading" for model, cards in zip(models, answers, strict=True)}
        if states is None:
            return Health(all(answers), words)
        words = {one.name: words.get(one.name, one.state) for one in states}
        return Health(all(words[one.name] == "ready" for one in states if one.awaited), words)

    async def metrics(self) -> bytes:
        """See `ModelRouter`: those of all replicas."""
        answers = await asyncio.gather(*(self.ask_all(model, "metrics_text") for model in await self._in_memory()))
        return merged(text for texts in answers for text in texts)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        answer: TokenizeResponse = await self.ask(request.model, "tokenize", request)
        return answer

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        answer: DetokenizeResponse = await self.ask(request.model, "detokenize", request)
        return answer

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        """See `ModelRouter`. From as many replicas as it takes."""
        context, model = replace(context, reader=self._reader), request.model
        sent: tuple[int, ...] = ()
        accepted = False
        deadline: float | None = monotonic() + self._recovery_s  # also where no replica lives yet, or any more
        while True:
            failed: Failed | None = None
            attempt: _Attempt | None = None
            try:
                attempt = _Attempt(self._route(model).handle, request, context, sent=sent)
                message = await self._awaited(model, attempt.next(), deadline)
                while message and failed is None:
                    for item in message:
                        if isinstance(item, Failed) and (item.lost or (accepted and item.code == QUEUE_FULL)):
                            failed = item
                            break
                        deadline = None
                        if isinstance(item, Chunk):
                            sent = item.sent
                        if not isinstance(item, Accepted) or not accepted:
                            yield item
                        accepted = True
                    else:
                        message = () if attempt.ended else await attempt.next()
                if failed is None:
                    return
            except BackPressureError as error:
                if not accepted:
                    yield _full(model)
                    return
                failed = _unavailable(model, error)  # it was let in when it came
            except _LOST as error:
                failed = _unavailable(model, error)
            except (*_ERRORS, RefusedError) as error:
                if not isinstance(error, RefusedError):
                    log.warning("a request failed", exc_info=error)
                yield Failed.of(error) if isinstance(error, RefusedError) else _unavailable(model, error)
                return
            finally:
                if attempt is not None:
                    attempt.close()
            if deadline is None:
                deadline = monotonic() + (self._resume_s if accepted else self._recovery_s)
            log.warning("%s was lost when %s tokens of an answer were sent: %s", model, sent, failed.message)
            if monotonic() > deadline:
                yield failed
                return
            await asyncio.sleep(_PAUSE_S)
            try:
                deadline += await self._demand(model)
            except RefusedError as error:
                yield Failed.of(error)
                return

    async def ask(self, model: str, method: str, *request: object) -> Any:
        """What one of the replicas answers. Raises RefusedError: it refuses, or there is none."""
        method_of = getattr(self._route(model).handle, method)
        try:
            try:
                return await self._awaited(model, _answer(method_of, request), monotonic() + self._recovery_s)
            except DeploymentUnavailableError:
                await self._demand(model)
                return await self._awaited(model, _answer(method_of, request), monotonic() + self._recovery_s)
        except RayTaskError as error:
            if isinstance(error.cause, RefusedError):
                raise error.cause from error
            raise
        except _ERRORS as error:
            raise _unavailable(model, error).error() from error

    async def ask_all(self, model: str, method: str, *request: object) -> list[Any]:
        """What those replicas answer that do, in good time."""
        try:
            broadcast = self._routes[model].handle.broadcast(method, *request)
            answers = await broadcast.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except (*_ERRORS, RuntimeError, KeyError):  # or it was removed meanwhile
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # ---- models that are not there

    def _route(self, model: str) -> ModelRoute:
        if model not in self._routes:
            raise model_not_found(model, list(self._routes))
        return self._routes[model]

    async def _awaited(self, model: str, work: Coroutine[Any, Any, Value], deadline: float | None) -> Value:
        """What a replica answers first. While nothing comes, the lifecycle is asked for one.

        Raises:
            RefusedError: there is none, and will be none.
            TimeoutError: the deadline is over.
        """
        task, pause = asyncio.ensure_future(work), _FIRST_LOOK_S
        try:
            while True:
                remaining = None if deadline is None else deadline - monotonic()
                await asyncio.wait([task], timeout=pause if remaining is None else min(pause, max(0.0, remaining)))
                if task.done():
                    return task.result()
                if deadline is not None and monotonic() >= deadline:
                    raise TimeoutError
                seconds = await self._demand(model)
                deadline = None if deadline is None else deadline + seconds
                pause = _LOOK_S
        finally:
            task.cancel()

    async def _demand(self, model: str) -> float:
        """Ask for a model that does not answer. -> seconds until it is loaded, which do not count for its request

        Raises:
            RefusedError: it is not there, and will not be.
        """
        began = monotonic()
        if self._lifecycle is not None:
            with suppress(PacelineError):  # nobody decides: it may be there again by itself
                await self._lifecycle.demand(model)
        return monotonic() - began

    async def _in_memory(self, states: Sequence[ModelState] | None = None) -> list[str]:
        """Models of which a replica should answer; a question to others would wait for nothing."""
        if self._lifecycle is None:
            return list(self._routes)
        states = states or await self._lifecycle.states()
        return [one.name for one in states if one.state in ("loaded", "scaled")]

    async def _cards(self, model: str, *, since: float | None = None) -> list[ModelCard]:
        """What the replicas of a model say of themselves, asked ``since`` then; None: now or a moment ago."""
        cached = self._seen[model]
        oldest = monotonic() - _LOOK_S if since is None else since
        async with cached.asking:
            if cached.at < oldest:
                cached.at = monotonic()
                cached.cards = await self.ask_all(model, "describe")
        return cached.cards


class _Attempt:
    """What one replica answers, message by message."""

    def __init__(
        self, handle: Any, request: GenerationRequest, context: RequestContext, *, sent: tuple[int, ...]
    ) -> None:
        self._answer = handle.options(stream=True).stream.remote(request, context, sent)
        self._messages = aiter(self._answer)
        self.ended = False

    async def next(self) -> tuple[Item, ...]:
        """The next items; () at the end. Raises RayError, RayServeException: it is lost, or there is none."""
        try:
            message = await anext(self._messages)
        except StopAsyncIteration:
            self.ended = True
            return ()
        items: tuple[Item, ...] = message if isinstance(message, tuple) else (message,)
        last = items[-1]
        self.ended = isinstance(last, Failed) or (isinstance(last, Chunk) and last.last)
        return items

    def close(self) -> None:
        """Give up what the answer holds."""
        if not self.ended:
            with suppress(Exception):  # it may be done, or its replica gone
                self._answer.cancel()


async def _answer(method: Any, request: Sequence[object]) -> Any:
    return await method.remote(*request)


def _full(model: str) -> Failed:
    message = f"{model} has as many requests waiting as it may; ask again later"
    return Failed(429, message, code=QUEUE_FULL, retry_after_s=1.0)


def _unavailable(model: str, error: Exception) -> Failed:
    """An error of Ray without its text, which has addresses and process ids."""
    message = f"{model} was lost ({type(error).__name__}) and did not come back in time; send the request again"
    return Failed(503, message, code=UNAVAILABLE, retry_after_s=5.0, lost=True)
