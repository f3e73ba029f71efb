"""What stands between the HTTP edge and the models: the edge (`paceline.serving.api`) sees a `ModelRouter` only.

A router finds a model server for a request, and asks another one where the first is lost. Rendering is done where the
tokens are (`paceline.serving.model_server`), so what crosses are finished bytes. Values and protocols only: no HTTP, no
model, no Ray.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from paceline.serving.openai.chat import ChatRequest
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.openai.responses import ResponsesRequest
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.refused import RefusedError
from paceline.serving.settings import SpecMetrics

if TYPE_CHECKING:
    from paceline.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request of a program, by ids (`paceline.placement.launch`). Its answer has tokens in place of text.

    params  without objects of the program's process
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
    """What is settled at the door, so that every server that is asked gives the same bytes.

    id            of the answer, without its prefix ("cmpl-", "chatcmpl-", ...); also names tool calls
    created       seconds since 1970, of the answer
    client        who asks: a digest of the API key, or "" without one; requests take turns by it
    deadline      seconds since 1970 when the answer must be complete; None: never
    spec_metrics  what the answer says about acceptance, unless the request says it
    max_sequence  tokens of a prompt and its answer together; None: as many as the model has positions
    interval_s    between the messages of a stream, at least; see `paceline.workers.calls.Call`
    reader        who takes the answer from a server in another process; see `paceline.serving.ray_guard`
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
    def new(
        cls,
        *,
        api_key: str = "",
        timeout_s: float | None = None,
        spec_metrics: SpecMetrics = "none",
        max_sequence: int | None = None,
        interval_s: float = 0.0,
    ) -> RequestContext:
        """Of a request that comes in now."""
        now = time.time()
        client = hashlib.sha256(api_key.encode()).hexdigest()[:16] if api_key else ""
        deadline = None if timeout_s is None else now + timeout_s
        return cls(secrets.token_hex(12), int(now), client, deadline, spec_metrics, max_sequence, interval_s)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first item of an answer: a model takes the request.

    prompt_tokens  of all its prompts
    followed       the next item is there already, so that both can go as one message
    """

    prompt_tokens: int
    followed: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer that can be sent as it is.

    data  with ``stream``: finished server-sent events, none or several. Else empty, until the last chunk has the body.
          For a `TokenRequest`: outputs, as `paceline.serving.render.answer.read_outputs` reads them
    sent  tokens of each choice up to here, of all chunks: what another server is told to skip if this one is lost
    last  whether the answer is complete
    """

    data: bytes
    sent: tuple[int, ...]
    last: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The last item of an answer that cannot be completed.

    lost   not the request's fault; another server may do
    cause  what a program is to be raised, of a `TokenRequest`
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    lost: bool = False
    cause: Exception | None = None

    @classmethod
    def of(cls, error: RefusedError, *, lost: bool = False, cause: Exception | None = None) -> Failed:
        """An error as an item."""
        return cls(error.status, error.message, error.param, error.code, error.retry_after_s, lost, cause)

    def error(self) -> RefusedError:
        """The item as an error."""
        return RefusedError(
            self.status, self.message, param=self.param, code=self.code, retry_after_s=self.retry_after_s
        )


Item = Accepted | Chunk | Failed
"""Of an answer, in order: `Accepted`, then chunks, the last of which is marked. `Failed` may take the place of any."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """Where one process of a model runs, for the page's map of the chip.

    name   of the model
    role   "target" or "draft"
    node   name of the machine
    cores  NeuronCores, or CPU cores of a simulated chip
    """

    name: str
    role: str
    node: str
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model server says about its model.

    name             as requests call it
    created          seconds since 1970 when it became ready
    max_model_len    positions, prompt included
    methods          names of drafter rows (`paceline.registry`); () is plain decoding
    num_spec_tokens  most drafted tokens of a round
    chat             whether there is a chat template
    tools, reasoning names of the parsers that its template calls for, or None
    placement        where its processes run
    """

    name: str
    created: int
    max_model_len: int
    methods: tuple[str, ...] = ()
    num_spec_tokens: int = 0
    chat: bool = False
    tools: str | None = None
    reasoning: str | None = None
    placement: tuple[PlacedModel, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """OpenAI's model object, vLLM's ``max_model_len``, and what else is known under ``paceline``."""
        fields = {
            "methods": list(self.methods),
            "num_spec_tokens": self.num_spec_tokens,
            "chat": self.chat,
            "tools": self.tools,
            "reasoning": self.reasoning,
            "placement": [
                {"name": one.name, "role": one.role, "node": one.node, "cores": list(one.cores)}
                for one in self.placement
            ],
        }
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "paceline",
            "max_model_len": self.max_model_len,
            "paceline": fields,
        }


@dataclass(frozen=True, slots=True)
class Health:
    """ready: whether every model that should be served can answer. models: a word on each ("ready", "loading", ...)."""

    ready: bool
    models: Mapping[str, str] = field(default_factory=dict)


class ModelRouter(Protocol):
    """Finds the server of a request's model. All methods may be called at the same time."""

    async def models(self) -> Sequence[ModelCard]:
        """Those that can answer now."""

    def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        """The answer. It never raises: what fails is a `Failed`, with 404 for a model that is not there, 503 for one
        that is not ready, 429 where a queue is full. Closing the iterator frees what the request holds.
        """

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """The ids of a text or a conversation.

        Raises:
            RefusedError: no such model, or what its tokenizer refuses.
        """

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """The text of ids.

        Raises:
            RefusedError: no such model, or ids out of its vocabulary.
        """

    async def health(self) -> Health:
        """How the models are."""

    async def metrics(self) -> bytes:
        """In Prometheus' text format."""
