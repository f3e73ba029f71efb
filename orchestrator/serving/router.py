"""Interface between HTTP and the models: `paceline.serving.api` uses a `ModelRouter` only. Responses are rendered where
the tokens are (`paceline.serving.model_server`), so only finished bytes are sent. No HTTP, no model, no Ray.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.serving.errors import RefusedError
from paceline.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ResponsesRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from paceline.serving.settings import ApiSettings, SpecMetrics

if TYPE_CHECKING:
    from paceline.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Request of a program, by token ids (`paceline.placement.launch`), whose response has tokens instead of text.
    ``params``: without objects of the program's process.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams

    stream: ClassVar[bool] = True
    prompt_field: ClassVar[str | None] = None


TextRequest = CompletionRequest | ChatRequest | ResponsesRequest
GenerationRequest = TextRequest | TokenRequest


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Request properties fixed by the ingress, so that every server that is tried returns the same bytes.

    id            id of the response, without its prefix ("cmpl-", "chatcmpl-", ...); also names tool calls
    created       time of the response, seconds since 1970
    client        identifies the caller: a digest of the API key, or "" without one; clients take turns
    deadline      seconds since 1970 when the response must be complete; None: never
    spec_metrics  acceptance metrics in the response, unless the request sets them
    max_sequence  tokens of a prompt and its response together; None: the model's number of positions
    interval_s    minimum interval between the messages of a stream; see `paceline.workers.calls.Call`
    reader        process that reads the response from a server in another one; see `paceline.serving.ray_guard`
    """

    id: str
    created: int
    client: str = ""
    deadline: float | None = None
    spec_metrics: SpecMetrics = "none"
    max_sequence: int | None = None
    interval_s: float = 0.0
    reader: str = ""

    @classmethod
    def new(cls, api_key: str = "", settings: ApiSettings | None = None) -> RequestContext:
        """Create the context of a request that arrives now. ``settings``: None: those of a `TokenRequest`."""
        now, client = time.time(), hashlib.sha256(api_key.encode()).hexdigest()[:16] if api_key else ""
        context = cls(secrets.token_hex(12), int(now), client)
        if settings is None:
            return context
        return replace(
            context,
            deadline=None if settings.request_timeout_s is None else now + settings.request_timeout_s,
            spec_metrics=settings.spec_metrics,
            max_sequence=settings.max_sequence_tokens,
            interval_s=settings.stream_interval_ms / 1000,
        )


@dataclass(frozen=True, slots=True)
class StreamStart:
    """First item of a response: a model accepts the request. ``prompt_tokens``: of all its prompts. ``followed``: the
    next item is ready, so that both can be sent as one message.
    """

    prompt_tokens: int
    followed: bool = False
    last: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """Part of a response that can be sent as it is.

    data  with ``stream``: finished server-sent events, zero or more. Else empty, until the last chunk has the body.
          For a `TokenRequest`: outputs, as `paceline.serving.answer.read_outputs` reads them
    sent  total tokens of each choice up to this chunk: the number that another server skips if this one is lost
    last  whether the response is complete
    """

    data: bytes
    sent: tuple[int, ...]
    last: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Last item of a response that cannot be completed.

    lost   not caused by the request; another server may succeed
    cause  exception to raise in the program, for a `TokenRequest`
    """

    error: RefusedError
    lost: bool = False
    cause: Exception | None = None
    last: ClassVar[bool] = True


Item = StreamStart | StreamChunk | Failed
"""Item of a response. In order: `StreamStart`, then chunks, the last of which is marked; `Failed` may replace each."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """Location of one process of a model, for the page's map of the chip.

    cores  NeuronCores, or CPU cores of a simulated chip
    node   id of the machine; ``host``: its name
    """

    name: str
    role: str
    node: str
    cores: tuple[int, ...]
    host: str = ""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Description of a model by its server.

    created          seconds since 1970 when it became ready
    max_model_len    positions, prompt included
    methods          names of drafter rows (`paceline.registry`); (): plain decoding
    drafters         names that a request may choose from
    num_spec_tokens  maximum number of drafted tokens per round
    tools, reasoning names of the parsers for its chat template, or None
    """

    name: str
    created: int
    max_model_len: int
    methods: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    num_spec_tokens: int = 0
    chat: bool = False
    tools: str | None = None
    reasoning: str | None = None
    placement: tuple[PlacedModel, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Return OpenAI's model object with vLLM's ``max_model_len``, and all other fields under ``paceline``."""
        about = asdict(self)
        own = {name: about[name] for name in about if name not in ("name", "created", "max_model_len")}
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "max_model_len": self.max_model_len,
            "paceline": own,
        }


@dataclass(frozen=True, slots=True)
class Health:
    """Whether every model that should be served can respond, and the state of each ("ready", ...)."""

    ready: bool
    models: Mapping[str, str] = field(default_factory=dict)


class ModelRouter(Protocol):
    """Finder of the server of a request's model. All methods may be called concurrently. `tokenize` and `detokenize`
    raise RefusedError; `metrics` returns Prometheus' text format.
    """

    async def models(self) -> Sequence[ModelCard]: ...

    def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        """Yield the response. Never raises: errors are `Failed` items, with 404 for an unknown model, 503 for one that
        is not ready, 429 if a queue is full. Closing the iterator frees the request's resources.
        """

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse: ...

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse: ...

    async def health(self) -> Health: ...

    async def metrics(self) -> bytes: ...
