"""A `ModelRouter` over Ray Serve: finds a replica for a request, and retries on another one if that is lost.

Tokens are a function of the request, including its seed. So another replica omits the tokens of each choice already
sent and sends the rest: the client sees a pause. If no replica responds, the lifecycle loads the model or rejects the
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from paceline.core.errors import PacelineError
from paceline.serving.errors import QUEUE_FULL, UNAVAILABLE, RefusedError, model_not_found
from paceline.serving.lifecycle import Lifecycle, ModelState
from paceline.serving.metrics import merged
from paceline.serving.openai.requests import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.router import (
    Failed,
    GenerationRequest,
    Health,
    Item,
    ModelCard,
    RequestContext,
    StreamChunk,
    StreamStart,
)

log = logging.getLogger("paceline")

RECOVERY_S = 120.0
"""Seconds in which a model without a replica must respond, for a request without a response so far."""
_PAUSE_S = 0.25  # before a retry, so that Serve detects the loss too
_FIRST_LOOK_S = 0.25  # for which a request waits for a response before the lifecycle is called
_LOOK_S = 1.0  # between calls of the lifecycle; also the lifetime of cached model cards
_ANSWER_S = 2.0  # timeout of such a poll
_LOST = (RayActorError, DeploymentUnavailableError)
_ERRORS = (RayError, RayServeException, TimeoutError)

Value = TypeVar("Value")


def deployment_name(model: str) -> str:
    return f"model-{model}"


@dataclass(slots=True)
class _Seen:
    """Cards of the replicas of a model, from the last poll."""

    cards: list[ModelCard] = field(default_factory=list)
    at: float = float("-inf")  # start of that poll
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServeRouter:
    """Router over Ray Serve.

    handles     model -> handle of its deployment
    lifecycle   loads models that are not loaded; None: all are
    recovery_s  how long a request without a response so far waits for a replica
    resume_s    how long a partial response waits for one: the maximum loading time of a model
    reader      this process's name for replicas; see `paceline.serving.ray_guard`
    """

    def __init__(
        self,
        handles: Mapping[str, Any],
        *,
        lifecycle: Lifecycle | None = None,
        recovery_s: float = RECOVERY_S,
        resume_s: float = RECOVERY_S,
        reader: str = "",
    ) -> None:
        self._handles, self._lifecycle, self._reader = dict(handles), lifecycle, reader
        self._recovery_s, self._resume_s = recovery_s, resume_s
        self._seen = {model: _Seen() for model in handles}

    def put(self, model: str, handle: Any) -> None:
        """Add or replace a model."""
        self._handles[model], self._seen[model] = handle, _Seen()

    def remove(self, model: str) -> None:
        self._handles.pop(model, None)

    async def models(self) -> Sequence[ModelCard]:
        answers = await asyncio.gather(*(self._cards(model) for model in await self._in_memory()))
        return [cards[0] for cards in answers if cards]

    async def cards(self, model: str) -> Sequence[ModelCard]:
        """Poll the replicas of a model for their cards; () if there are none."""
        return await self._cards(model, since=monotonic()) if model in self._handles else ()

    async def health(self) -> Health:
        """Poll the health of all models. A model that is rightly not in memory does not make the service unready."""
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
        answers = await asyncio.gather(*(self.ask_all(model, "metrics_text") for model in await self._in_memory()))
        return merged(text for texts in answers for text in texts)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        return await self.ask(request.model, "tokenize", request)  # type: ignore[no-any-return]

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        return await self.ask(request.model, "detokenize", request)  # type: ignore[no-any-return]

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        """Stream a response, from several replicas if some are lost."""
        context, model = replace(context, reader=self._reader), request.model
        sent: tuple[int, ...] = ()
        accepted = False
        deadline: float | None = monotonic() + self._recovery_s  # also while no replica is alive
        while True:
            failed: Failed | None = None
            answer: Any = None
            ended = False
            try:
                answer = self._handle(model).options(stream=True).stream.remote(request, context, sent)
                messages = aiter(answer)
                message = await self._awaited(model, anext(messages, ()), deadline)
                while failed is None:
                    items: tuple[Item, ...] = message if isinstance(message, tuple) else (message,)
                    ended = not items or items[-1].last
                    for item in items:
                        if isinstance(item, Failed) and (item.lost or (accepted and item.error.code == QUEUE_FULL)):
                            failed = item
                            break
                        deadline = None
                        if isinstance(item, StreamChunk):
                            sent = item.sent
                        if not isinstance(item, StreamStart) or not accepted:
                            yield item
                        accepted = True
                    else:
                        if ended:
                            return
                        message = await anext(messages, ())
            except BackPressureError as error:
                if not accepted:
                    full = f"{model} has as many requests waiting as it may; ask again later"
                    yield Failed(RefusedError(429, full, code=QUEUE_FULL, retry_after_s=1.0))
                    return
                failed = _unavailable(model, error)  # it was accepted before
            except _LOST as error:
                failed = _unavailable(model, error)
            except (*_ERRORS, RefusedError) as error:
                if not isinstance(error, RefusedError):
                    log.warning("a request failed", exc_info=error)
                yield Failed(error) if isinstance(error, RefusedError) else _unavailable(model, error)
                return
            finally:
                if answer is not None and not ended:
                    with suppress(Exception):  # it may be complete, or its replica lost
                        answer.cancel()
            if deadline is None:
                deadline = monotonic() + (self._resume_s if accepted else self._recovery_s)
            log.warning("%s: the replica was lost after %s tokens of a response: %s", model, sent, failed.error.message)
            if monotonic() > deadline:
                yield failed
                return
            await asyncio.sleep(_PAUSE_S)
            try:
                deadline += await self._demand(model)
            except RefusedError as error:
                yield Failed(error)
                return

    async def ask(self, model: str, method: str, *request: object) -> Any:
        """Call one of the replicas. Raises RefusedError if it rejects the call, or there is none."""
        handle = self._handle(model)

        def call() -> Awaitable[Any]:
            return self._awaited(model, getattr(handle, method).remote(*request), monotonic() + self._recovery_s)

        try:
            try:
                return await call()
            except DeploymentUnavailableError:
                await self._demand(model)
                return await call()
        except RayTaskError as error:
            if isinstance(error.cause, RefusedError):
                raise error.cause from error
            raise
        except _ERRORS as error:
            raise _unavailable(model, error).error from error

    async def ask_all(self, model: str, method: str, *request: object) -> list[Any]:
        try:
            broadcast = self._handles[model].broadcast(method, *request)
            answers = await broadcast.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except (*_ERRORS, RuntimeError, KeyError):  # or it was removed in between
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # ---- models that are not loaded

    def _handle(self, model: str) -> Any:
        if model not in self._handles:
            raise model_not_found(model, list(self._handles))
        return self._handles[model]

    async def _awaited(self, model: str, work: Awaitable[Value], deadline: float | None) -> Value:
        """Return a replica's first response; until then, call the lifecycle to load the model. Raises RefusedError if
        none will come, TimeoutError after the deadline.
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
        """Call the lifecycle to load a model; return the seconds that took, which extend the deadline."""
        began = monotonic()
        if self._lifecycle is not None:
            with suppress(PacelineError):  # no lifecycle responds: the model may recover
                await self._lifecycle.demand(model)
        return monotonic() - began

    async def _in_memory(self, states: Sequence[ModelState] | None = None) -> list[str]:
        """Models of which a replica should respond; polling others would only wait."""
        if self._lifecycle is None:
            return list(self._handles)
        states = states or await self._lifecycle.states()
        return [one.name for one in states if one.state in ("loaded", "scaled")]

    async def _cards(self, model: str, *, since: float | None = None) -> list[ModelCard]:
        """Return the cards of a model's replicas, polled ``since`` then; None: now or a moment ago."""
        cached = self._seen[model]
        oldest = monotonic() - _LOOK_S if since is None else since
        async with cached.asking:
            if cached.at < oldest:
                cached.at = monotonic()
                cached.cards = await self.ask_all(model, "describe")
        return cached.cards


def _unavailable(model: str, error: Exception) -> Failed:
    """Convert an error of Ray, without its text, which has addresses and process ids."""
    message = f"{model} was lost ({type(error).__name__}) and did not come back in time; send the request again"
    return Failed(RefusedError(503, message, code=UNAVAILABLE, retry_after_s=5.0), lost=True)
