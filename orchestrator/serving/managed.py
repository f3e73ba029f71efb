"""`ManagedRouter`: a `ModelRouter` whose models come and go, by what a `Lifecycle` decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from paceline.core.errors import PacelineError
from paceline.serving.model_state import Lifecycle
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.openai.union import GenerationRequest
from paceline.serving.refused import RefusedError, refusal
from paceline.serving.router import Failed, Health, Item, ModelCard, ModelRouter, RequestContext


class ManagedRouter:
    """A `ModelRouter` over another one. ``lifecycle``: knows every model of it."""

    def __init__(self, router: ModelRouter, lifecycle: Lifecycle) -> None:
        self._router, self.lifecycle = router, lifecycle

    async def models(self) -> Sequence[ModelCard]:
        """See `ModelRouter`."""
        return await self._router.models()

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        """See `ModelRouter`."""
        try:
            async with self.lifecycle.use(request.model):
                async for item in self._router.stream(request, context):
                    yield item
        except (RefusedError, PacelineError) as error:
            yield Failed.of(refusal(error))

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """See `ModelRouter`."""
        async with self.lifecycle.use(request.model):
            return await self._router.tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """See `ModelRouter`."""
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
        """See `ModelRouter`."""
        return await self._router.metrics()
