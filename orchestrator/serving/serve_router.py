"""A `ModelRouter` over Ray Serve: finds a replica for a request, and asks another one where that is lost.

Tokens are a function of the request, its seed included, so a replica that is told how many tokens of each choice were
sent already leaves those out and sends the rest: the client sees a pause. Not here: HTTP (`paceline.serving.api`) and
what a replica does (`paceline.serving.replica`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from paceline.serving.metrics import merged
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.refused import QUEUE_FULL, UNAVAILABLE, RefusedError, model_not_found
from paceline.serving.router import Accepted, Chunk, Failed, GenerationRequest, Health, Item, ModelCard, RequestContext

log = logging.getLogger("paceline")

RECOVERY_S = 120.0
"""Seconds in which a model without a replica has to answer, for a request of which nothing was answered yet."""
_PAUSE_S = 0.25  # before asking again, so that Serve learns of the death too
_LOOK_S = 1.0  # for which an answer of the models about themselves is good
_ANSWER_S = 2.0  # that such an answer may take
_LOST = (RayActorError, DeploymentUnavailableError)
_ERRORS = (RayError, RayServeException, TimeoutError)

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Where a model is served. ``handle``: of its deployment."""

    handle: Any


@dataclass(slots=True)
class _Seen:
    """What the replicas of a model said of themselves when they were last asked."""

    cards: list[ModelCard] = field(default_factory=list)
    at: float = float("-inf")  # when that question began
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServeRouter:
    """See the module.

    recovery_s  how long a request of which nothing was answered yet waits for a replica
    resume_s    how long an answer that has begun waits for one: as long as a model may take to be loaded
    reader      this process, as replicas know it; see `paceline.serving.ray_guard`
    """

    def __init__(
        self,
        routes: Mapping[str, ModelRoute],
        *,
        recovery_s: float = RECOVERY_S,
        resume_s: float = RECOVERY_S,
        reader: str = "",
    ) -> None:
        self._routes, self._recovery_s, self._resume_s, self._reader = dict(routes), recovery_s, resume_s, reader
        self._seen = {model: _Seen() for model in routes}

    def put(self, model: str, route: ModelRoute) -> None:
        """A model that was not served until now, or elsewhere."""
        self._routes[model], self._seen[model] = route, _Seen()

    def remove(self, model: str) -> None:
        """A model that is served no more."""
        self._routes.pop(model, None)

    async def models(self) -> Sequence[ModelCard]:
        """See `ModelRouter`: those with a replica that answers."""
        answers = await asyncio.gather(*(self._cards(model) for model in self._routes))
        return [cards[0] for cards in answers if cards]

    async def cards(self, model: str, *, fresh: bool = False) -> Sequence[ModelCard]:
        """What the replicas of a model say of themselves; () where there are none. ``fresh``: now, not a moment ago."""
        if model not in self._routes:
            return ()
        if fresh:
            self.forget(model)
        return await self._cards(model)

    def forget(self, model: str) -> None:
        """Its replicas are other ones now."""
        self._seen[model].at = float("-inf")

    async def health(self) -> Health:
        """See `ModelRouter`. Nothing that a replica said before this question counts."""
        now = monotonic()
        answers = await asyncio.gather(*(self._cards(model, since=now) for model in self._routes))
        states = {model: "ready" if cards else "loading" for model, cards in zip(self._routes, answers, strict=True)}
        return Health(all(answers), states)

    async def metrics(self) -> bytes:
        """See `ModelRouter`: those of all replicas."""
        answers = await asyncio.gather(*(self._ask_all(model, "metrics_text") for model in self._routes))
        return merged(text for texts in answers for text in texts)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        answer: TokenizeResponse = await self.ask(request.model, "tokenize", request)
        return answer

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        answer: DetokenizeResponse = await self.ask(request.model, "detokenize", request)
        return answer

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        """See `ModelRouter`. From as many replicas as it takes."""
        context = replace(context, reader=self._reader)
        sent: tuple[int, ...] = ()
        accepted = False
        deadline: float | None = monotonic() + self._recovery_s  # also where no replica lives yet, or any more
        while True:
            if request.model not in self._routes:
                yield Failed.of(model_not_found(request.model, list(self._routes)))
                return
            failed: Failed | None = None
            try:
                seconds = None if deadline is None else deadline - monotonic()
                async with aclosing(self._attempt(request, context, sent, seconds=seconds)) as items:
                    async for item in items:
                        if isinstance(item, Failed) and (item.lost or (accepted and item.code == QUEUE_FULL)):
                            failed = item
                            break
                        deadline = None
                        if isinstance(item, Chunk):
                            sent = item.sent
                        if not isinstance(item, Accepted) or not accepted:
                            yield item
                        accepted = True
                if failed is None:
                    return
            except BackPressureError as error:
                if accepted:  # it was let in when it came; who takes it over has those of all replicas that are gone
                    failed = _unavailable(request.model, error)
                else:
                    yield _full(request.model)
                    return
            except _LOST as error:
                failed = _unavailable(request.model, error)
            except _ERRORS as error:
                log.warning("a request failed", exc_info=error)
                yield _unavailable(request.model, error)
                return
            if deadline is None:
                deadline = monotonic() + (self._resume_s if accepted else self._recovery_s)
            log.warning("%s was lost when %s tokens of an answer were sent: %s", request.model, sent, failed.message)
            if monotonic() > deadline:
                yield failed
                return
            await asyncio.sleep(_PAUSE_S)

    async def _attempt(
        self, request: GenerationRequest, context: RequestContext, sent: Sequence[int], *, seconds: float | None
    ) -> AsyncGenerator[Item, None]:
        """What one replica answers. ``seconds``: until its first item, at most.

        Raises:
            RayError, RayServeException, TimeoutError: it is lost, or there is none.
        """
        items = self._routes[request.model].handle.options(stream=True).stream.remote(request, context, tuple(sent))
        ended = False
        try:
            iterator = aiter(items)
            try:
                message = await asyncio.wait_for(anext(iterator), seconds)
                while True:
                    for item in message if isinstance(message, tuple) else (message,):
                        ended = isinstance(item, Failed) or (isinstance(item, Chunk) and item.last)
                        yield item
                    message = await anext(iterator)
            except StopAsyncIteration:
                return
        finally:
            if not ended:
                with suppress(Exception):  # it may be done, or its replica gone
                    items.cancel()

    # ---- other questions

    async def _cards(self, model: str, *, since: float | None = None) -> list[ModelCard]:
        """What the replicas of a model say of themselves, asked ``since`` then; None: now or a moment ago."""
        cached = self._seen[model]
        oldest = monotonic() - _LOOK_S if since is None else since
        async with cached.asking:
            if cached.at < oldest:
                cached.at = monotonic()
                cached.cards = await self._ask_all(model, "describe")
        return cached.cards

    async def _ask_all(self, model: str, method: str) -> list[Any]:
        """What those replicas answer that do, in good time."""
        try:
            broadcast = self._routes[model].handle.broadcast(method)
            answers = await broadcast.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except (*_ERRORS, RuntimeError):
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def ask(self, model: str, method: str, *request: object) -> Any:
        """What one of the replicas answers. Raises RefusedError: it refuses, or there is none."""
        if model not in self._routes:
            raise model_not_found(model, list(self._routes))
        try:
            return await getattr(self._routes[model].handle, method).remote(*request)
        except RayTaskError as error:
            if isinstance(error.cause, RefusedError):
                raise error.cause from error
            raise
        except _ERRORS as error:
            raise _unavailable(model, error).error() from error


def _full(model: str) -> Failed:
    message = f"{model} has as many requests waiting as it may; ask again later"
    return Failed(429, message, code=QUEUE_FULL, retry_after_s=1.0)


def _unavailable(model: str, error: Exception) -> Failed:
    """An error of Ray without its text, which has addresses and process ids."""
    message = f"{model} was lost ({type(error).__name__}) and did not come back in time; send the request again"
    return Failed(503, message, code=UNAVAILABLE, retry_after_s=5.0, lost=True)
