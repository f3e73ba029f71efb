"""Answers of /v1/completions, /v1/chat/completions and /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

from paceline.serving.answer import DONE, AnswerStep, ChoiceText, OutputItem, PartKind, TokenPiece, Usage, event
from paceline.serving.openai.requests import ChatRequest, CompletionRequest, NamedFunction, ResponsesRequest
from paceline.serving.parsers import ToolCallDelta
from paceline.serving.router import RequestContext

BytesOf = Callable[[int], bytes]
"""Function from a token to its bytes, whose concatenation is that of the text."""


def token_text(data: bytes) -> str:
    return data.decode(errors="replace")


def _name(data: bytes) -> str:
    """A token's name in a completion: its text, or its bytes if it is part of a character, as in OpenAI's API."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


Likeliest = Sequence[tuple[int, float]]
"""(id, log-probability) of the most likely tokens."""

Echo = tuple[str, Sequence[int]]
"""Text and ids of a prompt."""


def _characters(token: bytes) -> int:
    """Number of characters that begin in a token."""
    return sum(byte & 0xC0 != 0x80 for byte in token)


def _prompt_offsets(text: str, tokens: Sequence[bytes]) -> list[int]:
    """The begin of each token of a prompt in its text, which may lack special tokens and a space before it."""
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(min(offset, len(text)))
        shown = token.decode(errors="replace")
        if offset or text.startswith(shown):
            offset += _characters(token)
        elif shown[:1] == " " and text.startswith(shown[1:]):
            offset += len(shown) - 1
    return offsets


class _ChoicesWriter:
    """Base of the writers of completions and chats."""

    by_token = False
    _id, _object, _streamed = "", "", ""  # prefix of ids; names of a whole response and of a streamed part

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        context: RequestContext,
        bytes_of: BytesOf,
        *,
        said: Mapping[str, object] | None = None,
    ) -> None:
        self._request, self._context, self._bytes_of = request, context, bytes_of
        self._num_top = request.top_logprobs_wanted
        self._head: Mapping[str, object] = {
            "id": f"{self._id}-{context.id}",
            "object": self._streamed if request.stream else self._object,
            "created": context.created,
            "model": request.model,
            **(said or {}),
        }

    def step(self, step: AnswerStep, usage: Callable[[], Usage]) -> bytes:
        choice, request = self._choice(step.choice, step, self._delta(step)), self._request
        shown = request.return_token_ids or request.return_token_origins
        if not (shown or any(choice[name] for name in choice if name != "index")):
            return b""
        options, counts = request.stream_options, {}
        if options.include_usage:
            counts = {"usage": usage().to_dict() if options.continuous_usage_stats else None}
        return event({**self._head, "choices": [choice], **counts})

    def end(self, usage: Usage, metrics: Mapping[str, object]) -> bytes:
        if not self._request.stream_options.include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": usage.to_dict(), **metrics}) + DONE

    def body(self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object]) -> Mapping[str, object]:
        rendered = [self._choice(index, one, self._whole(index, one)) for index, one in enumerate(choices)]
        return {**self._head, "choices": rendered, "usage": usage.to_dict(), **metrics}

    def _choice(self, index: int, part: AnswerStep | ChoiceText, content: Mapping[str, object]) -> dict[str, object]:
        """Return a choice, with vLLM's ``token_ids`` and Paceline's origins if they are requested."""
        logprobs = self._logprobs(index, part)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": part.finish_reason}
        if self._request.return_token_ids:
            choice["token_ids"] = [piece.token for piece in part.pieces]
        if self._request.return_token_origins:
            choice["token_origins"] = [self._origin(piece) for piece in part.pieces]
        return choice

    def _origin(self, piece: TokenPiece) -> dict[str, object]:
        origin: dict[str, object] = {"text": piece.text, "origin": piece.origin}
        if piece.replaced:
            origin["drafted"] = [token_text(self._bytes_of(token)) for token in piece.replaced]
        return origin

    def _delta(self, step: AnswerStep) -> Mapping[str, object]:
        """The content of a streamed choice."""
        raise NotImplementedError

    def _whole(self, index: int, choice: ChoiceText) -> Mapping[str, object]:
        """The content of a whole choice."""
        raise NotImplementedError

    def _logprobs(self, index: int, part: AnswerStep | ChoiceText) -> dict[str, object] | None:
        raise NotImplementedError


class CompletionWriter(_ChoicesWriter):
    """Writes the responses to one completion request. ``prompts``: text and ids to repeat for each choice, or ()."""

    _id, _object, _streamed = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, request: CompletionRequest, context: RequestContext, bytes_of: BytesOf, *, prompts: Sequence[Echo]
    ) -> None:
        super().__init__(request, context, bytes_of)
        self._prompts, self._offsets = prompts, dict[int, int]()

    def _delta(self, step: AnswerStep) -> Mapping[str, object]:
        begun = self._prompts[step.choice][0] if step.first and self._prompts else ""
        return {"text": begun + step.delta.content}

    def _whole(self, index: int, choice: ChoiceText) -> Mapping[str, object]:
        return {"text": (self._prompts[index][0] if self._prompts else "") + choice.content}

    def _logprobs(self, index: int, part: AnswerStep | ChoiceText) -> dict[str, object] | None:
        count = self._num_top
        if count is None or not (part.pieces or part.prompt is not None):
            return None
        scored: list[tuple[int, float | None, Likeliest | None]] = []
        offsets: list[int] = []
        if part.prompt is not None:
            text, ids = self._prompts[index]
            scored = [(ids[0], None, None), *((one.token, one.logprob, one.top) for one in part.prompt)]
            offsets = _prompt_offsets(text, [self._bytes_of(token) for token in ids])
            self._offsets[index] = len(text)
        scored += [(piece.token, piece.logprob, piece.top) for piece in part.pieces]
        tokens = [self._bytes_of(token) for token, _, _ in scored]
        offset = self._offsets.get(index, 0)
        for token in tokens[len(offsets) :]:
            offsets.append(offset)
            offset += _characters(token)
        self._offsets[index] = offset
        tops = [None if top is None else self._top(top[:count]) for _, _, top in scored]
        return {
            "tokens": list(map(_name, tokens)),
            "token_logprobs": [logprob for _, logprob, _ in scored],
            "top_logprobs": tops if count else None,
            "text_offset": offsets,
        }

    def _top(self, likeliest: Likeliest) -> dict[str, float]:
        """By name; another token of the same name by its id, as vLLM writes it."""
        top: dict[str, float] = {}
        for token, logprob in likeliest:
            name = _name(self._bytes_of(token))
            top[f"token_id:{token}" if name in top else name] = logprob
        return top


class ChatWriter(_ChoicesWriter):
    _id, _object, _streamed = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _delta(self, step: AnswerStep) -> Mapping[str, object]:
        delta: dict[str, object] = {"role": "assistant", "content": ""} if step.first else {}
        if step.delta.content:
            delta["content"] = step.delta.content
        if step.delta.reasoning:
            delta["reasoning"] = step.delta.reasoning
        if step.delta.tool_calls:
            delta["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.name is None
                else {"index": call.index, **self._call(step.choice, call)}
                for call in step.delta.tool_calls
            ]
        return {"delta": delta}

    def _whole(self, index: int, choice: ChoiceText) -> Mapping[str, object]:
        content = choice.content if choice.content or not choice.tool_calls else None
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            calls = (ToolCallDelta(place, call.name, call.text) for place, call in enumerate(choice.tool_calls))
            message["tool_calls"] = [self._call(index, call) for call in calls]
        return {"message": message}

    def _call(self, choice: int, call: ToolCallDelta) -> dict[str, object]:
        id_ = f"call_{self._context.id}_{choice}_{call.index}"
        return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _logprobs(self, index: int, part: AnswerStep | ChoiceText) -> dict[str, object] | None:
        if self._num_top is None or not part.pieces:
            return None
        content = [
            {
                **self._one(piece.token, piece.logprob),
                "top_logprobs": [self._one(token, logprob) for token, logprob in piece.top[: self._num_top]],
            }
            for piece in part.pieces
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float | None) -> dict[str, object]:
        data = self._bytes_of(token)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}


_Item = dict[str, object]


class ResponsesWriter:
    """Writer of /v1/responses. Streamed or not, a response has the same items, one for each part. If the length limit
    cut it, the last one is incomplete: clients must not execute such a call.
    """

    by_token = True

    def __init__(self, request: ResponsesRequest, context: RequestContext, said: Mapping[str, object]) -> None:
        self._said = said
        self._request, self._id, self._created = request, context.id, context.created
        self._numbers = count()
        self._text = ChoiceText()
        self._is_open = False  # whether the last part still grows

    # ---- streamed

    def step(self, step: AnswerStep, usage: Callable[[], Usage]) -> bytes:
        events = b""
        if step.first:
            events = b"".join(self._event(name, response=self._response("in_progress")) for name in _BEGINNING)
        events += self._grow("reasoning", step.delta.reasoning) + self._grow("message", step.delta.content)
        for call in step.delta.tool_calls:
            events += self._grow_call(call)
        if step.finish_reason is not None:
            self._text.finish_reason = step.finish_reason
            events += self._close(_status(step.finish_reason))
        return events

    def end(self, usage: Usage, metrics: Mapping[str, object]) -> bytes:
        response = self._whole(self._text, usage, metrics)
        return self._event(f"response.{response['status']}", response=response)

    def _grow(self, kind: PartKind, text: str) -> bytes:
        if not text:
            return b""
        parts, events = self._text.parts, b""
        if not self._is_open or parts[-1].kind != kind:
            events = self._close()
            self._text.write(kind, text)
            events += self._added()
            if kind == "message":
                events += self._in_part("response.content_part.added", part=_output_text(""))
        else:
            self._text.write(kind, text)
        if kind == "message":
            return events + self._in_part("response.output_text.delta", delta=text, logprobs=[])
        return events + self._in_part("response.reasoning_text.delta", delta=text)

    def _grow_call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name is not None:
            events = self._close()
            self._text.call(call)
            events += self._added()
        else:
            self._text.call(call)
        if call.arguments:
            events += self._of_item("response.function_call_arguments.delta", delta=call.arguments)
        return events

    def _added(self) -> bytes:
        self._is_open = True
        begun = OutputItem(self._text.parts[-1].kind, name=self._text.parts[-1].name)
        item = self._item(self._index, begun, "in_progress")
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: str = "completed") -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        part = self._text.parts[-1]
        if part.kind == "message":
            events = self._in_part("response.output_text.done", text=part.text, logprobs=[])
            events += self._in_part("response.content_part.done", part=_output_text(part.text))
        elif part.kind == "reasoning":
            events = self._in_part("response.reasoning_text.done", text=part.text)
        else:
            events = self._of_item("response.function_call_arguments.done", arguments=part.text, name=part.name)
        item = self._item(self._index, part, status)
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self._text.parts) - 1

    def _of_item(self, type_: str, **fields: object) -> bytes:
        id_ = self._item_id(self._index, self._text.parts[-1].kind)
        return self._event(type_, item_id=id_, output_index=self._index, **fields)

    def _in_part(self, type_: str, **fields: object) -> bytes:
        return self._of_item(type_, content_index=0, **fields)

    def _event(self, type_: str, **fields: object) -> bytes:
        return event({"type": type_, "sequence_number": next(self._numbers), **fields}, type_)

    # ---- whole

    def body(self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object]) -> Mapping[str, object]:
        (choice,) = choices
        return self._whole(choice, usage, metrics)

    def _whole(self, choice: ChoiceText, usage: Usage, metrics: Mapping[str, object]) -> dict[str, object]:
        status, last = _status(choice.finish_reason), len(choice.parts) - 1
        output = [
            self._item(index, part, status if index == last else "completed") for index, part in enumerate(choice.parts)
        ]
        return {**self._response(status, output=output, usage=usage), **metrics}

    def _item_id(self, index: int, kind: PartKind) -> str:
        return f"{_PREFIXES[kind]}_{self._id}_{index}"

    def _item(self, index: int, part: OutputItem, status: str) -> _Item:
        item: _Item = {"id": self._item_id(index, part.kind), "type": part.kind, "status": status}
        if part.kind == "function_call":
            return {**item, "call_id": f"call_{self._id}_{index}", "name": part.name, "arguments": part.text}
        if part.kind == "message":
            return {**item, "role": "assistant", "content": [_output_text(part.text)] if part.text else []}
        content = [{"type": "reasoning_text", "text": part.text}] if part.text else []
        return {**item, "summary": [], "content": content}

    def _response(self, status: str, output: Sequence[_Item] = (), usage: Usage | None = None) -> dict[str, object]:
        request = self._request
        counts = None
        if usage is not None:
            counts = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        cut, choice = {"reason": "max_output_tokens"} if status == "incomplete" else None, request.tool_choice
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": counts,
            "metadata": request.metadata,
            **self._said,
        }


_BEGINNING = ("response.created", "response.in_progress")
_PREFIXES: Mapping[PartKind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _output_text(text: str) -> _Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"
