"""`ModelServer`: one model with its engine, from a request to finished bytes. No HTTP, no Ray.

The output is a function of the request and its context. Given the number of tokens already sent (``skip``), another
server of the same model computes the same tokens and sends the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.core.errors import BackendError, CheckpointError, EventLoopError, PacelineError, PlacementError
from paceline.engine.request import Request, SamplingParams, TargetLimits
from paceline.serving.answer import (
    Answer,
    AnswerWriter,
    ChoiceRenderer,
    TokenAnswer,
    acceptance_metrics,
)
from paceline.serving.errors import TOO_LONG, RefusedError, model_not_found, refusal
from paceline.serving.openai.fields import SAME_SAMPLING
from paceline.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    Message,
    NamedTool,
    ResponsesRequest,
    TokenizeRequest,
    TokenizeResponse,
    Tool,
)
from paceline.serving.parsers import (
    JsonListParser,
    ListOrTextParser,
    NamedCallParser,
    OneCallParser,
    Parser,
    ReasoningParser,
    ReasoningRow,
    calls_schema,
    reasoning_of,
)
from paceline.serving.router import (
    Failed,
    GenerationRequest,
    Health,
    Item,
    ModelCard,
    RequestContext,
    StreamChunk,
    StreamStart,
    TokenRequest,
)
from paceline.serving.tool_formats import TOLD, ToolFormat, told_turns, tool_format
from paceline.serving.writers import ChatWriter, CompletionWriter, Echo, ResponsesWriter, token_text
from paceline.text.chat import for_template, roles_in_parts
from paceline.text.stop_strings import StopStringFilter, StopStrings
from paceline.text.structured_output import ReasoningMarkers, StructuredOutput
from paceline.text.tokenizer import TokenBytes, decoder_of, with_markers
from paceline.workers.calls import Call
from paceline.workers.shared_engine import AsyncEngine, SharedEngine

log = logging.getLogger("paceline")

_FIRST_TOKEN_WAIT_S = 0.05  # for which a request may wait for its first token before it is reported as accepted
_BODY_S = 0.25  # between parts of a response without streaming: they are rendered during decoding, not all at its end


class ModelServer:
    """Server of one model. Used from one event loop; its calls share the rounds of the engine.

    limits  limits of the engine's generator (`SpeculativeGenerator.limits`)
    card    description of the model, without its chat format
    """

    def __init__(self, tokenizer: Tokenizer, engine: SharedEngine, limits: TargetLimits, *, card: ModelCard) -> None:
        self._tokenizer, self._engine, self._limits = tokenizer, engine, limits
        self._token_bytes, self._decoder = TokenBytes(tokenizer), decoder_of(tokenizer)
        self._format = form = ChatFormat.of(tokenizer)
        self._chat_decoders = {tools: with_markers(tokenizer, form.markers(tools=tools)) for tools in (False, True)}
        self.card = replace(
            card,
            chat=bool(form.template),
            tools=None if form.tools is None else form.tools.name,
            reasoning=None if form.reasoning is None else form.reasoning.name,
        )
        self._calls: AsyncEngine | None = None

    async def stream(
        self, request: GenerationRequest, context: RequestContext, skip: Sequence[int] = ()
    ) -> AsyncIterator[Item]:
        """Yield the response: `StreamStart` as soon as the request waits for a slot, then chunks; or `Failed` at any
        point.

        ``skip``: number of tokens of each choice that were sent before; () if none were. Raises EventLoopError if
        another event loop uses this server; every other failure is an item.
        """
        if self._calls is None or self._calls.loop.is_closed():
            self._calls = AsyncEngine(self._engine)
        answer = None
        try:
            # Templates and tokenizers take milliseconds, and more for long prompts.
            prompt_tokens, requests, answer = await asyncio.to_thread(self._prepare, request, context, tuple(skip))
            deadline = None if context.deadline is None else time.monotonic() + context.deadline - time.time()
            interval_s = context.interval_s if request.stream else _BODY_S
            call = Call(f"{context.id}-{time.monotonic_ns()}", requests, context.client, deadline, interval_s)
            with closing(self._calls.begin(call)) as updates:
                first = asyncio.ensure_future(updates.next())
                try:
                    # The call is enqueued or rejected, and its first token may have arrived.
                    await asyncio.wait([first], timeout=_FIRST_TOKEN_WAIT_S)
                    if first.done() and first.exception() is None:
                        yield StreamStart(prompt_tokens, followed=True)
                    elif not first.done():
                        yield StreamStart(prompt_tokens)
                    update = await first
                finally:
                    first.cancel()
                    await asyncio.wait([first])
                while update is not None:
                    data = answer.push(update.outputs)
                    if all(answer.ended) or (update.ended and update.error is None):
                        yield StreamChunk(data + answer.end(), answer.sent, last=True)
                        return
                    if ended := [index for index, is_over in enumerate(answer.ended) if is_over]:
                        self._engine.leave(call.ticket, ended)
                    if data:
                        yield StreamChunk(data, answer.sent)
                    update = await updates.next()
            yield StreamChunk(answer.end(), answer.sent, last=True)
        except EventLoopError:
            raise
        except Exception as error:  # also errors of tokenizers, which may have any class
            lost, cause = isinstance(error, BackendError | PlacementError), None
            if isinstance(request, TokenRequest) and isinstance(error, PacelineError):
                cause = error
            yield Failed(refusal(error, request.prompt_field), lost, cause)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        return await asyncio.to_thread(self._tokenize, request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        if unknown := [token for token in request.tokens if token >= self._limits.vocab_size]:
            size = self._limits.vocab_size
            raise RefusedError(
                400,
                f"tokens: expected ids of the vocabulary of {size}, got {unknown[0]}; use the model's own tokenizer",
                param="tokens",
            )
        text = await asyncio.to_thread(self._tokenizer.decode, list(request.tokens), skip_special_tokens=False)
        return DetokenizeResponse(prompt=text)

    def _tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        if request.messages is None:
            ids = self._tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens)
        else:
            text = _chat_text(self._tokenizer, request, self._format)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        texts = [token_text(self._token_bytes(token)) for token in ids] if request.return_token_strs else None
        return TokenizeResponse(
            count=len(ids), max_model_len=self._limits.n_positions, tokens=list(ids), token_strs=texts
        )

    # ---- from a request to a call of the engine, and to the writer of its response

    def _prepare(
        self, request: GenerationRequest, context: RequestContext, skip: Sequence[int]
    ) -> tuple[int, list[Request], Answer | TokenAnswer]:
        """-> tokens of all prompts, the requests to the engine, and what writes their response"""
        if isinstance(request, TokenRequest):
            return self._prepare_ids(request, skip)
        asked = request.chat() if isinstance(request, ResponsesRequest) else request
        told, decoder = False, self._decoder
        if isinstance(asked, ChatRequest):
            prompts = chat_prompts(self._tokenizer, asked, self._format)
            told = self._format.calls_by_grammar(asked)
            decoder = self._chat_decoders[bool(asked.tools_offered)]
        else:
            prompts = _completion_prompts(self._tokenizer, asked)
        params = sampling_params(asked, self._tokenizer, prompts.reasoning, told=told)
        rows = [ids for ids in prompts.ids for _ in range(asked.n)]
        requests = Request.batch(rows, params, self._limits_of(asked, rows, context.max_sequence))
        said = {"tool_call_format": "generic"} if told else {}
        writer: AnswerWriter
        if isinstance(request, ResponsesRequest):
            writer = ResponsesWriter(request, context, said)
        elif isinstance(request, CompletionRequest):
            writer = CompletionWriter(request, context, self._token_bytes, prompts=prompts.echoed)
        else:
            writer = ChatWriter(request, context, self._token_bytes, said=said)
        pieces = asked.top_logprobs_wanted is not None or asked.return_token_ids or asked.return_token_origins
        choices = [
            ChoiceRenderer(
                index,
                StopStringFilter(requests[0].stop_strings, decoder, ids),
                self._parser(asked, prompts),
                skip=skip[index] if skip else 0,
                by_token=writer.by_token,
                pieces=pieces,
            )
            for index, ids in enumerate(rows)
        ]
        spec_tokens = 0 if asked.speculative.is_off else self.card.num_spec_tokens
        level = asked.speculative.metrics or context.spec_metrics
        prompt_tokens = sum(map(len, prompts.ids))
        metrics = partial(acceptance_metrics, num_spec_tokens=spec_tokens, level=level)
        return prompt_tokens, requests, Answer(asked, writer, choices, prompt_tokens=prompt_tokens, metrics=metrics)

    def _prepare_ids(self, request: TokenRequest, skip: Sequence[int]) -> tuple[int, list[Request], TokenAnswer]:
        params = request.params
        if params.stop_strings or params.structured_outputs is not None or isinstance(params.prediction, str):
            params = replace(params, tokenizer=self._tokenizer)
        requests = Request.batch(request.prompts, params, self._limits)
        return sum(map(len, request.prompts)), requests, TokenAnswer(len(requests), skip)

    def _limits_of(
        self, request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], most: int | None
    ) -> TargetLimits:
        """Return the limits for a request. ``most``: tokens of a prompt and its response that the operator allows."""
        room = self._limits.n_positions if most is None else min(most, self._limits.n_positions)
        longest, requested = max(map(len, prompts)), request.tokens_asked
        if requested is not None and longest < room < longest + requested:
            message = (
                f"max_tokens: expected at most {room} tokens with the prompt of {longest}, got {requested}; omit "
                "max_tokens to get as many as fit"
            )
            raise RefusedError(400, message, param="max_tokens", code=TOO_LONG)
        return replace(self._limits, n_positions=room)

    def _parser(self, request: CompletionRequest | ChatRequest, prompts: RequestPrompts) -> Parser:
        parser: Parser = Parser()
        if not isinstance(request, ChatRequest):
            return parser
        if isinstance(request.tool_choice, NamedTool):
            parser = NamedCallParser(request.tool_choice.function.name)
        elif request.tool_choice == "required":
            parser = JsonListParser()
        elif self._format.tools is not None and (request.tools_offered or self._format.tools.always):
            calls = self._format.tools.make(request.tool_schemas)
            parser = calls if request.parallel_tool_calls else OneCallParser(calls)
        elif self._format.calls_by_grammar(request):
            parser = ListOrTextParser()
        if self._format.reasoning is not None:
            return ReasoningParser(self._format.reasoning, parser, started=prompts.in_reasoning)
        return parser


class LocalRouter:
    """Model servers of this process, by model name, as a `paceline.serving.router.ModelRouter`, so that HTTP runs
    without Ray. ``metrics`` returns the metrics text.
    """

    def __init__(self, servers: Mapping[str, ModelServer], metrics: Callable[[], bytes] = bytes) -> None:
        self._servers, self._metrics = servers, metrics

    async def models(self) -> Sequence[ModelCard]:
        return [server.card for server in self._servers.values()]

    def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        try:
            return self._server(request.model).stream(request, context)
        except RefusedError as error:
            return _failed(error)

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


async def _failed(error: RefusedError) -> AsyncIterator[Item]:
    yield Failed(error)


class NoTokenizer:
    """In place of the tokenizer of a checkpoint without one, for requests by ids."""

    def __init__(self, error: CheckpointError) -> None:
        self._error = error

    def encode(self, text: str, **_: Any) -> list[int]:
        raise self._error

    def decode(self, token_ids: list[int], **_: Any) -> str:
        raise self._error


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Properties of a model's chat template, and how its responses are parsed.

    template   its text; empty without one
    tools      format of its tool calls, if it supports tools
    reasoning  its markers of reasoning
    in_parts   roles whose content it reads only as a list of parts
    """

    template: str = ""
    tools: ToolFormat | None = None
    reasoning: ReasoningRow | None = None
    in_parts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFormat:
        templates: Any = getattr(tokenizer, "chat_template", None)
        if not templates:
            return cls()
        # A tokenizer may have several named templates; the one for tools has most information.
        template = templates if isinstance(templates, str) else "\n".join(map(str, dict(templates).values()))
        return cls(template, tool_format(template), reasoning_of(template), roles_in_parts(tokenizer))

    def tells(self, request: ChatRequest | TokenizeRequest) -> bool:
        """Whether messages tell the model of a request's functions, since its template has no known form for them."""
        return bool(request.tools_offered) and self.tools is None

    def calls_by_grammar(self, request: ChatRequest) -> bool:
        """Whether the grammar of a response admits calls or text; a structure that the request asks for has neither."""
        return self.tells(request) and request.structured is None

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Return the strings that response parsers search for and that may be special tokens. ``tools``: calls are
        possible.
        """
        marks = self.tools.tokens if self.tools is not None and (tools or self.tools.always) else ()
        return marks if self.reasoning is None else (*marks, self.reasoning.start, self.reasoning.end)


@dataclass(frozen=True, slots=True)
class RequestPrompts:
    """Prompts of one request.

    echoed          text and ids of the prompt of each choice, if it is repeated in the response
    in_reasoning    whether the template has already opened the reasoning of the response
    reasoning       markers of the reasoning that may precede the response; None: there is none
    """

    ids: list[list[int]]
    echoed: tuple[Echo, ...] = ()
    in_reasoning: bool = False
    reasoning: ReasoningMarkers | None = None


def _completion_prompts(tokenizer: Tokenizer, request: CompletionRequest) -> RequestPrompts:
    given: Any = request.prompt
    prompts: list[str | list[int]] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    if not request.echo:
        return RequestPrompts(ids)
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt)) for prompt in prompts]
    return RequestPrompts(ids, tuple(one for one in zip(texts, ids, strict=True) for _ in range(request.n)))


def chat_prompts(tokenizer: Tokenizer, request: ChatRequest, form: ChatFormat) -> RequestPrompts:
    text = _chat_text(tokenizer, request, form)
    ids, row = [tokenizer.encode(text, add_special_tokens=False)], form.reasoning
    if row is None:
        return RequestPrompts(ids)
    said = request.messages[-1].text if request.continue_final_message else ""
    opened = said.rfind(row.start) > said.rfind(row.end) if said else text.rstrip().endswith(row.start)
    if not opened and (said or text.rstrip().endswith(row.end)):  # no reasoning: it is finished, or switched off
        return RequestPrompts(ids)
    markers = ReasoningMarkers(row.end, "" if opened else row.start)
    return RequestPrompts(ids, in_reasoning=opened, reasoning=markers)


def _chat_text(tokenizer: Tokenizer, request: ChatRequest | TokenizeRequest, form: ChatFormat) -> str:
    chat_tokenizer: Any = tokenizer
    if not form.template:
        raise RefusedError(400, "messages: this model has no chat template; use /v1/completions", param="messages")
    given = request.template_kwargs
    taken = {*inspect.signature(chat_tokenizer.apply_chat_template).parameters, "messages"} if given else set()
    if (name := next((one for one in given if one in taken), None)) is not None:
        raise RefusedError(
            400,
            f"chat_template_kwargs: {name!r} cannot be passed to the template; omit it",
            param="chat_template_kwargs",
        )
    tools = [tool.model_dump(exclude={"function": {"strict"}}) for tool in request.tools_offered] or None
    turns = [_as_dict(message) for message in request.messages or ()]
    opened = {"add_generation_prompt": request.opens_turn, "continue_final_message": request.continue_final_message}
    kwargs = {**given, **opened}
    forms, told = [turns, _with_text_arguments(turns)], form.tells(request)
    if told:
        functions, tools = [one["function"] for one in tools or ()], None
        forms = [told_turns(turns, functions, system=system) for system in (True, False)]
    refused: Exception | str = "it leaves the functions out"
    for tried in forms:
        tried = for_template(tried, form.in_parts)
        try:
            text = str(chat_tokenizer.apply_chat_template(tried, tools=tools, tokenize=False, **kwargs))
        except Exception as error:  # templates are programs that may raise any error
            refused = error
            continue
        if not told or TOLD in text:  # some leave system messages out
            return text
    raise RefusedError(
        400,
        f"messages: the chat template rejects them ({refused}); correct the roles or their order",
        param="messages",
    ) from (refused if isinstance(refused, Exception) else None)


def _with_text_arguments(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**turn, "tool_calls": [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn["tool_calls"]
        ]} if "tool_calls" in turn else dict(turn)
        for turn in turns
    ]  # fmt: skip


def _as_dict(message: Message) -> dict[str, Any]:
    """Convert a message for templates: content as text, arguments of calls as objects; `developer` is `system`."""
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.thoughts is not None:
        entry["reasoning_content"] = entry["thinking"] = message.thoughts  # gpt-oss has the second name
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError) as error:
                name = call.function.name
                raise RefusedError(
                    400,
                    f"messages: expected JSON as the arguments of {name!r}, got {error}; correct them",
                    param="messages",
                ) from error
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        entry["tool_calls"] = calls
    return entry


def sampling_params(
    request: CompletionRequest | ChatRequest,
    tokenizer: Tokenizer,
    reasoning: ReasoningMarkers | None = None,
    *,
    told: bool = False,
) -> SamplingParams:
    """Return the sampling parameters for the engine. A greedy request has all values too, so that one out of range is
    always rejected.

    ``reasoning``: markers of the text that may precede a structured response. ``told``: see `ChatFormat.tells`. Raises
    SamplingError, also for a schema, expression or grammar that cannot be compiled.
    """
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    structured = _structured(request, told=told)
    return SamplingParams(
        max_new_tokens=request.max_new_tokens,
        do_sample=request.temperature != 0,
        stop_strings=StopStrings(stops, scope="output") if stops else None,
        repetition_penalty=None if request.repetition_penalty == 1 else request.repetition_penalty,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} or None,
        prompt_logprobs=request.logprobs if isinstance(request, CompletionRequest) and request.echo else None,
        logprobs=request.top_logprobs_wanted,
        structured_outputs=None if structured is None else replace(structured, after=reasoning),
        prediction=request.prediction.text if request.prediction is not None else None,
        use_speculation=not request.speculative.is_off,
        **{name: getattr(request, name) for name in SAME_SAMPLING},
        max_draft_tokens=request.speculative.k or None,
        drafter=request.speculative.drafter,
        tokenizer=tokenizer,
    )


def _structured(request: CompletionRequest | ChatRequest, *, told: bool) -> StructuredOutput | None:
    """The structure required of the text: the request's own, or that of the calls that it requires, or may make where
    messages told of them.
    """
    if isinstance(request, ChatRequest) and (calls := _demanded_calls(request)) is not None:
        return StructuredOutput("json_schema", calls)
    if (constraint := request.structured) is None:
        if not told or not isinstance(request, ChatRequest):
            return None
        return StructuredOutput("grammar", _CALLS_OR_TEXT + json.dumps(_calls(request)))
    if constraint.json_object is not None:
        return StructuredOutput("json_object") if constraint.json_object else None
    for kind in ("json_schema", "regex", "choice", "grammar"):
        if (value := getattr(constraint, kind)) is not None:
            break
    return StructuredOutput(kind, str(value).lower() if isinstance(value, bool) else value)


def _demanded_calls(request: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema of the required calls: arguments of one function, or a list of calls of any."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return next(_arguments(tool) for tool in request.tools if tool.function.name == choice.function.name)
    return _calls(request) if choice == "required" else None


_CALLS_OR_TEXT = r"""start: calls | text
text: /\s*[^\[\s](.|\n)*/
calls: %json """


def _calls(request: ChatRequest) -> dict[str, Any]:
    functions = [(tool.function.name, _arguments(tool)) for tool in request.tools]
    return calls_schema(functions, several=request.parallel_tool_calls)


def _arguments(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}
