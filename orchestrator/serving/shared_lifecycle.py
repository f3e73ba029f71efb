"""`SharedLifecycle`: what a process of HTTP has of the one `ModelLifecycle` of its service, which may be elsewhere.

It knows what it was told last, so that a request for a loaded model asks nobody, and says twice a second who uses what.
Before a model leaves, every process is told, and reports once more: so what one process uses, no other's request, idle
time or lack of room takes away. Not here: HTTP, Ray, and what is decided.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.placement.planning.residency import Residency
from paceline.serving.lifecycle import ANSWERS, PERIOD_S, Lifecycle, ModelState, Report, View, first_state, is_awaited
from paceline.serving.middleware import KeyCounts
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.refused import RefusedError, model_not_found, refusal
from paceline.serving.router import Failed, GenerationRequest, Health, Item, ModelCard, ModelRouter, RequestContext

log = logging.getLogger("paceline")


class Owner(Protocol):
    """The process with the `ModelLifecycle`. What it refuses it refuses with a RefusedError."""

    async def exchange(self, process: str, report: Report) -> View | None:
        """See `ModelLifecycle.reported`. None: there is nothing to decide, and never was; all is as the file says.

        Raises:
            PacelineError: it does not answer now.
        """

    async def demand(self, name: str) -> None:
        """See `ModelLifecycle`."""

    async def load(self, name: str) -> ModelState:
        """See `ModelLifecycle`."""

    async def unload(self, name: str) -> ModelState:
        """See `ModelLifecycle`."""

    async def pin(self, name: str, pinned: bool) -> ModelState:
        """See `ModelLifecycle`."""


class SharedLifecycle:
    """A `paceline.serving.lifecycle.Lifecycle`.

    owner        the process that decides
    residencies  of every model of the service, by name
    follow       is told which models are loaded, whenever that may have changed
    keys         requests by API key, of which the owner adds up those of all processes
    """

    def __init__(
        self,
        owner: Owner,
        residencies: Mapping[str, Residency],
        *,
        follow: Callable[[Collection[str]], None] = lambda _: None,
        keys: KeyCounts | None = None,
    ) -> None:
        self._owner, self._follow, self._keys = owner, follow, keys or KeyCounts()
        self._process = secrets.token_hex(8)
        self._states = {name: _as_in_the_file(name, own) for name, own in residencies.items()}
        self._seen = 0
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._asking = asyncio.Lock()  # what is said in one order arrives in that order

    def states(self) -> list[ModelState]:
        """See `Lifecycle`: as they were told last."""
        return list(self._states.values())

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        if name not in self._states:
            raise model_not_found(name, list(self._states))
        self._running[name] += 1
        try:
            while self._states[name].state not in ANSWERS:
                await self._owner.demand(name)
                await self.restore()
            yield
        finally:
            self._running[name] -= 1
            self._used[name] = monotonic()

    async def load(self, name: str) -> ModelState:
        return await self._told(await self._owner.load(name))

    async def unload(self, name: str) -> ModelState:
        return await self._told(await self._owner.unload(name))

    async def pin(self, name: str, *, pinned: bool) -> ModelState:
        return await self._told(await self._owner.pin(name, pinned))

    async def restore(self) -> None:
        """See `Lifecycle`. Reports too."""
        async with self._asking:
            now = monotonic()
            report = Report(
                {name: count for name, count in self._running.items() if count},
                {name: now - used for name, used in self._used.items()},
                self._keys.own(),
                self._seen,
            )
            view = await self._owner.exchange(self._process, report)
            if view is None:
                return
            self._keys.elsewhere = view.keys
            if view.version != self._seen:
                self._follow([one.name for one in view.states if one.state in ANSWERS])
            self._states = {one.name: one for one in view.states}
            self._seen = view.version

    async def watch(self) -> None:
        """See `Lifecycle`. While nobody answers, what was told last holds."""
        silent = False
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.restore()
                silent = False
            except Exception as error:  # the next time may succeed
                if not silent:
                    known = isinstance(error, PacelineError)
                    log.warning("nobody says which models are in memory (%s)", error, exc_info=not known)
                silent = True

    async def _told(self, state: ModelState) -> ModelState:
        await self.restore()
        return state


def _as_in_the_file(name: str, residency: Residency) -> ModelState:
    state = first_state(residency)
    awaited = is_awaited(residency, state)
    return ModelState(name, state, residency.load, residency.pinned, awaited, 0, 0.0, residency.idle_ttl_s)


class ManagedRouter:
    """A `ModelRouter` over another one. ``lifecycle``: knows every model of it."""

    def __init__(self, router: ModelRouter, lifecycle: Lifecycle) -> None:
        self._router, self.lifecycle = router, lifecycle

    async def models(self) -> Sequence[ModelCard]:
        return await self._router.models()

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        try:
            async with self.lifecycle.use(request.model):
                async for item in self._router.stream(request, context):
                    yield item
        except (RefusedError, PacelineError) as error:
            yield Failed.of(refusal(error))

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        async with self.lifecycle.use(request.model):
            return await self._router.tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        async with self.lifecycle.use(request.model):
            return await self._router.detokenize(request)

    async def health(self) -> Health:
        """See `ModelRouter`. A model that is not in memory, as it should be, is no reason not to be ready."""
        models = (await self._router.health()).models
        words = {
            one.name: models.get(one.name, "loading") if one.state in ("loaded", "scaled") else one.state
            for one in self.lifecycle.states()
        }
        awaited = [one.name for one in self.lifecycle.states() if one.awaited]
        return Health(all(words[name] == "ready" for name in awaited), words)

    async def metrics(self) -> bytes:
        return await self._router.metrics()
