"""`ModelServer`: one model behind its engine, from a request to finished bytes. No HTTP, no Ray.

What it sends is a function of the request and its context. Another server of the same model, told how many tokens were
sent (``skip``), computes the same tokens and sends the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from paceline.core.detokenizer import Decodes, Tokenizer
from paceline.core.errors import BackendError, PlacementError
from paceline.engine.request import Request, TargetLimits
from paceline.serving.openai.chat import ChatRequest, NamedTool
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.openai.responses import ResponsesRequest
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.openai.union import GenerationRequest
from paceline.serving.parsers.base import Parser, PlainText
from paceline.serving.parsers.reasoning import ReasoningParser
from paceline.serving.parsers.tools import JsonListParser, NamedCallParser, OneCallParser
from paceline.serving.prompts import ChatFormat, ChatPrompt, Prompts, chat_prompts, chat_text, completion_prompts
from paceline.serving.refused import TOO_LONG, RefusedError, refusal
from paceline.serving.render.acceptance import Acceptance
from paceline.serving.render.answer import Answer, AnswerPlan
from paceline.serving.render.choice import ChoiceRenderer
from paceline.serving.render.openai_writers import ChatWriter, CompletionWriter
from paceline.serving.render.pieces import AnswerWriter
from paceline.serving.render.responses_writer import ResponsesWriter
from paceline.serving.router import Accepted, Chunk, Failed, Item, ModelCard, RequestContext
from paceline.serving.sampling import sampling_params
from paceline.text.stop_strings import StopStringFilter, StopStrings
from paceline.text.tokenizer import with_markers
from paceline.workers.async_engine import AsyncEngine
from paceline.workers.calls import Call
from paceline.workers.shared_engine import SharedEngine

log = logging.getLogger("paceline")

_FIRST_TOKEN_WAIT_S = 0.05  # that a request may wait for its first token until it is said that a model takes it
_BODY_S = 0.25  # between the parts of an answer that is not streamed: it is written down on the way, not all at its end


class ModelServer:
    """Serves one model. Used from one event loop; its calls share the rounds of the engine.

    limits  of the engine's generator (`SpeculativeGenerator.limits`)
    card    what is said about the model; its format of chats is filled in here
    """

    def __init__(self, tokenizer: Tokenizer, engine: SharedEngine, limits: TargetLimits, *, card: ModelCard) -> None:
        self._tokenizer, self._engine, self._limits = tokenizer, engine, limits
        self._format = form = ChatFormat.of(tokenizer)
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
        """The answer: `Accepted` as soon as the request waits for a slot, then chunks; or `Failed`, wherever it fails.

        ``skip``: tokens of each choice that were sent before; () where nothing was.

        Raises:
            EventLoopError: another event loop uses this server. (Every other failure is an item.)
        """
        if self._calls is None or self._calls.is_over:
            self._calls = AsyncEngine(self._engine)
        self._calls.check_loop()
        answer = None
        try:
            # Templates and tokenizers take milliseconds, and more for long prompts.
            prompts, requests, answer = await asyncio.to_thread(self._prepare, request, context, tuple(skip))
            call = _call(requests, context, stream=request.stream)
            async with aclosing(self._calls.generate(call)) as updates:
                first = asyncio.ensure_future(anext(updates, None))
                try:
                    # The call is enqueued, or refused, and perhaps its first token is there.
                    await asyncio.wait([first], timeout=_FIRST_TOKEN_WAIT_S)
                    if first.done() and first.exception() is None:
                        yield Accepted(prompts.num_tokens, followed=True)
                    elif not first.done():
                        yield Accepted(prompts.num_tokens)
                    update = await first
                finally:
                    first.cancel()
                    await asyncio.wait([first])  # a generator that runs cannot be closed
                while update is not None:
                    data = answer.push(update.outputs)
                    if all(answer.ended) or (update.ended and update.error is None):
                        yield Chunk(data + answer.end(), answer.sent, last=True)
                        return
                    self._calls.leave(call.ticket, *(index for index, ended in enumerate(answer.ended) if ended))
                    if data:
                        yield Chunk(data, answer.sent)
                    update = await anext(updates, None)
            yield Chunk(answer.end(), answer.sent, last=True)
        except Exception as error:  # tokenizers too, which raise errors of any class
            yield Failed.of(refusal(error, request.prompt_field), lost=isinstance(error, BackendError | PlacementError))

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """See `ModelRouter`."""
        return await asyncio.to_thread(self._tokenize, request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """See `ModelRouter`."""
        if unknown := [token for token in request.tokens if token >= self._limits.vocab_size]:
            size = self._limits.vocab_size
            raise RefusedError(400, f"id {unknown[0]} is outside the vocabulary of {size}", param="tokens")
        text = await asyncio.to_thread(self._tokenizer.decode, list(request.tokens), skip_special_tokens=False)
        return DetokenizeResponse(prompt=text)

    def _tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        if request.messages is None:
            ids = self._tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens)
        else:
            prompt = ChatPrompt(
                request.messages, request.tools, request.chat_template_kwargs, request.add_generation_prompt
            )
            ids = self._tokenizer.encode(chat_text(self._tokenizer, prompt, self._format), add_special_tokens=False)
        texts = [self._token_text(token) for token in ids] if request.return_token_strs else None
        return TokenizeResponse(
            count=len(ids), max_model_len=self._limits.n_positions, tokens=list(ids), token_strs=texts
        )

    # ---- from a request to what is asked of the engine, and to what writes its answer

    def _prepare(
        self, request: GenerationRequest, context: RequestContext, skip: Sequence[int]
    ) -> tuple[Prompts, list[Request], Answer]:
        chat_request = request.chat() if isinstance(request, ResponsesRequest) else request
        if isinstance(chat_request, ChatRequest):
            prompts = chat_prompts(self._tokenizer, chat_request, self._format)
        else:
            prompts = completion_prompts(self._tokenizer, chat_request)
        params = sampling_params(chat_request, self._tokenizer, prompts.reasoning)
        rows = [ids for ids in prompts.ids for _ in range(chat_request.candidates)]
        requests = Request.batch(rows, params, self._limits_of(chat_request, rows, context.max_sequence))
        writer = self._writer(request, context, prompts)
        stop = StopStrings.of(params.stop_strings)
        shown: Decodes = self._tokenizer
        if isinstance(chat_request, ChatRequest):
            shown = with_markers(shown, self._format.markers(tools=bool(chat_request.tools_offered)))
        choices = [
            ChoiceRenderer(
                index,
                StopStringFilter(stop, shown, ids),
                self._parser(chat_request, prompts),
                skip=skip[index] if skip else 0,
                by_token=writer.by_token,
            )
            for index, ids in enumerate(rows)
        ]
        level = chat_request.speculative.metrics or context.spec_metrics
        plan = AnswerPlan(prompts.num_tokens, chat_request.candidates, chat_request.n, chat_request.stream, level)
        spec_tokens = 0 if chat_request.speculative.is_off else self.card.num_spec_tokens
        return prompts, requests, Answer(plan, writer, choices, acceptance=Acceptance(spec_tokens))

    def _limits_of(
        self, request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], most: int | None
    ) -> TargetLimits:
        """``most``: tokens of a prompt and its answer together, as the operator allows.

        Raises:
            RefusedError: the request says that it wants more.
        """
        if most is None:
            return self._limits
        longest, requested = max(map(len, prompts)), request.max_new_tokens
        if requested is not None and longest + requested > most:
            message = f"a prompt of {longest} tokens and max_tokens={requested} are more than the {most} allowed here"
            raise RefusedError(400, message, param="max_tokens", code=TOO_LONG)
        return replace(self._limits, n_positions=min(most, self._limits.n_positions))

    def _parser(self, request: CompletionRequest | ChatRequest, prompts: Prompts) -> Parser:
        """What finds reasoning and calls in the text of one choice."""
        parser: Parser = PlainText()
        if not isinstance(request, ChatRequest):
            return parser
        if isinstance(request.tool_choice, NamedTool):
            parser = NamedCallParser(request.tool_choice.function.name)
        elif request.tool_choice == "required":
            parser = JsonListParser()
        elif request.tools_offered and self._format.tools is not None:
            calls = self._format.tools.make(request.tool_schemas)
            parser = calls if request.parallel_tool_calls else OneCallParser(calls)
        if self._format.reasoning is not None:
            return ReasoningParser(self._format.reasoning, parser, started=prompts.in_reasoning)
        return parser

    def _writer(self, request: GenerationRequest, context: RequestContext, prompts: Prompts) -> AnswerWriter:
        head: dict[str, object] = {"created": context.created, "model": request.model}
        if isinstance(request, ResponsesRequest):
            return ResponsesWriter(request, context.id, context.created)
        if isinstance(request, CompletionRequest):
            head |= {"id": f"cmpl-{context.id}", "object": "text_completion"}
            return CompletionWriter(request, head, self._token_text, prompts=prompts.texts)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        head |= {"id": f"chatcmpl-{context.id}", "object": kind}
        return ChatWriter(
            request, head, self._token_text, call_id=lambda choice, index: f"call_{context.id}_{choice}_{index}"
        )

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _call(requests: Sequence[Request], context: RequestContext, *, stream: bool) -> Call:
    """What the engine is asked."""
    deadline = None if context.deadline is None else time.monotonic() + context.deadline - time.time()
    ticket, interval_s = f"{context.id}-{time.monotonic_ns()}", context.interval_s if stream else _BODY_S
    return Call(ticket, requests, key=context.client, deadline=deadline, interval_s=interval_s)
