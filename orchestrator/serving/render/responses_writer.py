"""Answers of /v1/responses: typed items, and numbered events where the answer is streamed.

Events depend on the tokens alone, one token at a time, so that another server can go on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from paceline.serving.openai.responses import ResponsesRequest
from paceline.serving.parsers.base import ToolCallDelta
from paceline.serving.render.pieces import ChoiceText, Step, Usage, event

_Item = dict[str, object]


class ResponsesWriter:
    """Writes the answer to one request. ``id_``: of the answer, without a prefix; ``created``: seconds since 1970."""

    by_token = True

    def __init__(self, request: ResponsesRequest, id_: str, created: int) -> None:
        self._request, self._id, self._created = request, id_, created
        self._numbers = count()
        self._text = ChoiceText()
        self._open: str | None = None  # kind of the item that grows
        self._done: list[_Item] = []
        self._item: _Item = {}
        self._grown = ""

    # ---- streamed

    def step(self, step: Step, usage: Usage) -> bytes:
        """See `AnswerWriter`."""
        self._text.add(step)
        parts = []
        if step.first:
            parts += [self._event(name, response=self._response("in_progress")) for name in _BEGINNING]
        if step.delta.reasoning:
            parts.append(self._grow("reasoning", step.delta.reasoning))
        if step.delta.content:
            parts.append(self._grow("message", step.delta.content))
        parts += [self._grow_call(call) for call in step.delta.tool_calls]
        if step.finish_reason is not None:
            parts.append(self._close())
        return b"".join(parts)

    def end(self, usage: Usage, metrics: Mapping[str, object] | None) -> bytes:
        """See `AnswerWriter`."""
        status = "incomplete" if self._text.finish_reason == "length" else "completed"
        response = self._response(status, output=self._done, usage=usage)
        if metrics is not None:
            response["metrics"] = metrics
        return self._event(f"response.{status}", response=response)

    def _grow(self, kind: str, text: str) -> bytes:
        before = b""
        if self._open != kind:
            before = self._close()
            self._open, self._grown = kind, ""
            self._item = self._new_item(kind)
            before += self._event("response.output_item.added", output_index=self._index, item=self._item)
            if kind == "message":
                before += self._in_part("response.content_part.added", part=_output_text(""))
        self._grown += text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        extra: dict[str, object] = {"logprobs": []} if kind == "message" else {}
        return before + self._in_part(name, delta=text, **extra)

    def _grow_call(self, call: ToolCallDelta) -> bytes:
        before = b""
        if call.name is not None:
            before = self._close()
            self._open, self._grown = "function_call", ""
            self._item = {**self._new_item("function_call"), "name": call.name}
            before += self._event("response.output_item.added", output_index=self._index, item=self._item)
        if not call.arguments:
            return before
        self._grown += call.arguments
        return before + self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def _close(self) -> bytes:
        """The end of the item that grows."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        item = {**self._item, "status": "completed"}
        if kind == "message":
            part = _output_text(self._grown)
            events = self._in_part("response.output_text.done", text=self._grown, logprobs=[])
            events += self._in_part("response.content_part.done", part=part)
            item["content"] = [part]
        elif kind == "reasoning":
            events = self._in_part("response.reasoning_text.done", text=self._grown)
            item["content"] = [{"type": "reasoning_text", "text": self._grown}]
        else:
            name = "response.function_call_arguments.done"
            events = self._of_item(name, arguments=self._grown, name=self._item["name"])
            item["arguments"] = self._grown
        events += self._event("response.output_item.done", output_index=self._index, item=item)
        self._done.append(item)
        return events

    @property
    def _index(self) -> int:
        return len(self._done)

    def _of_item(self, type_: str, **fields: object) -> bytes:
        return self._event(type_, item_id=self._item["id"], output_index=self._index, **fields)

    def _in_part(self, type_: str, **fields: object) -> bytes:
        return self._of_item(type_, content_index=0, **fields)

    def _event(self, type_: str, **fields: object) -> bytes:
        return event({"type": type_, "sequence_number": next(self._numbers), **fields}, type_)

    # ---- whole

    def body(
        self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object] | None
    ) -> Mapping[str, object]:
        """See `AnswerWriter`."""
        (choice,) = choices
        if choice.reasoning:
            part: _Item = {"type": "reasoning_text", "text": choice.reasoning}
            self._done.append({**self._new_item("reasoning"), "status": "completed", "content": [part]})
        if choice.content or not choice.tool_calls:
            part = _output_text(choice.content)
            self._done.append({**self._new_item("message"), "status": "completed", "content": [part]})
        for call in choice.tool_calls:
            fields = {"name": call.name, "arguments": call.arguments, "status": "completed"}
            self._done.append({**self._new_item("function_call"), **fields})
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        response = self._response(status, output=self._done, usage=usage)
        return response if metrics is None else {**response, "metrics": metrics}

    def _new_item(self, kind: str) -> _Item:
        id_ = f"{_PREFIXES[kind]}_{self._id}_{self._index}"
        item: _Item = {"id": id_, "type": kind, "status": "in_progress"}
        if kind == "message":
            return {**item, "role": "assistant", "content": []}
        if kind == "reasoning":
            return {**item, "summary": [], "content": []}
        return {**item, "call_id": f"call_{self._id}_{self._index}", "name": "", "arguments": ""}

    def _response(self, status: str, output: Sequence[_Item] = (), usage: Usage | None = None) -> dict[str, object]:
        request = self._request
        counts = None
        if usage is not None:
            counts = {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
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
            "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else "auto",
            "tools": [tool.model_dump() for tool in request.tools],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": counts,
            "metadata": request.metadata,
        }


_BEGINNING = ("response.created", "response.in_progress")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _output_text(text: str) -> _Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
