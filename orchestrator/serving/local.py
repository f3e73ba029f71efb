"""`LocalRouter`: model servers of this process as a `ModelRouter`, so that the HTTP edge runs without Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from paceline.serving.model_server import ModelServer
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.refused import model_not_found
from paceline.serving.router import Failed, GenerationRequest, Health, Item, ModelCard, RequestContext


class LocalRouter:
    """A `paceline.serving.router.ModelRouter`. ``servers``: those that are in it now. ``metrics``: gives their text."""

    def __init__(self, servers: Mapping[str, ModelServer], metrics: Callable[[], bytes] = bytes) -> None:
        self._servers, self._metrics = servers, metrics

    async def models(self) -> Sequence[ModelCard]:
        return [server.card for server in self._servers.values()]

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        server = self._servers.get(request.model)
        if server is None:
            yield Failed.of(model_not_found(request.model, list(self._servers)))
            return
        async for item in server.stream(request, context):
            yield item

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        return await self._server(request.model).tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        return await self._server(request.model).detokenize(request)

    async def health(self) -> Health:
        return Health(True, dict.fromkeys(self._servers, "ready"))

    async def metrics(self) -> bytes:
        return self._metrics()

    def _server(self, name: str) -> ModelServer:
        if name not in self._servers:
            raise model_not_found(name, list(self._servers))
        return self._servers[name]
