"""Answers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.serving.openai.chat import ChatRequest
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.parsers.base import ToolCallDelta
from paceline.serving.render.pieces import DONE, ChoiceText, Step, TokenPiece, Usage, event

TokenText = Callable[[int], str]
"""The text of one token by itself."""


class CompletionWriter:
    """Writes the answers to one completion request.

    ``prompts``: the texts that are repeated (``echo``), one for each choice; () repeats nothing.
    """

    by_token = False

    def __init__(
        self, request: CompletionRequest, head: Mapping[str, object], token_text: TokenText, *, prompts: Sequence[str]
    ) -> None:
        self._request, self._head, self._token_text, self._prompts = request, dict(head), token_text, prompts
        self._offsets: dict[int, int] = {}

    def step(self, step: Step, usage: Usage) -> bytes:
        """See `AnswerWriter`."""
        text = step.delta.content
        if step.first and self._prompts:
            text = self._prompts[step.choice] + text
        extras = self._extras(step.choice, step.pieces)
        if not text and step.finish_reason is None and not extras["logprobs"] and not _shows_tokens(self._request):
            return b""
        choice = {"index": step.choice, "text": text, "finish_reason": step.finish_reason, **extras}
        return event({**self._head, "choices": [choice], **_stream_usage(self._request, usage)})

    def end(self, usage: Usage, metrics: Mapping[str, object] | None) -> bytes:
        """See `AnswerWriter`."""
        return _last_event(self._request, self._head, usage, metrics=metrics) + DONE

    def body(
        self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object] | None
    ) -> Mapping[str, object]:
        """See `AnswerWriter`."""
        rendered = [
            {
                "index": index,
                "text": (self._prompts[index] if self._prompts else "") + choice.content,
                "finish_reason": choice.finish_reason,
                **self._extras(index, choice.pieces),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": rendered, "usage": usage.to_dict(), **_metrics(metrics)}

    def _extras(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, object]:
        return {"logprobs": self._logprobs(index, pieces), **_token_fields(self._request, pieces)}

    def _logprobs(self, index: int, pieces: Sequence[TokenPiece]) -> dict[str, object] | None:
        if self._request.logprobs is None or not pieces:
            return None
        texts = [self._token_text(piece.token) for piece in pieces]
        offset, offsets = self._offsets.get(index, 0), []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        tops = [
            {self._token_text(token): logprob for token, logprob in piece.top[: self._request.logprobs]}
            for piece in pieces
        ]
        return {
            "tokens": texts,
            "token_logprobs": [piece.logprob for piece in pieces],
            "top_logprobs": tops if self._request.logprobs else None,
            "text_offset": offsets,
        }


class ChatWriter:
    """Writes the answers to one chat request. ``call_id``: the id of a call, by choice and index."""

    by_token = False

    def __init__(
        self,
        request: ChatRequest,
        head: Mapping[str, object],
        token_text: TokenText,
        *,
        call_id: Callable[[int, int], str],
    ) -> None:
        self._request, self._head, self._token_text, self._call_id = request, dict(head), token_text, call_id

    def step(self, step: Step, usage: Usage) -> bytes:
        """See `AnswerWriter`."""
        delta: dict[str, object] = {"role": "assistant", "content": ""} if step.first else {}
        if step.delta.content:
            delta["content"] = step.delta.content
        if step.delta.reasoning:
            delta["reasoning"] = step.delta.reasoning
        if step.delta.tool_calls:
            delta["tool_calls"] = [self._call_delta(step.choice, call) for call in step.delta.tool_calls]
        logprobs = self._logprobs(step.pieces)
        if not delta and step.finish_reason is None and logprobs is None and not _shows_tokens(self._request):
            return b""
        choice = {
            "index": step.choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": step.finish_reason,
            **_token_fields(self._request, step.pieces),
        }
        return event({**self._head, "choices": [choice], **_stream_usage(self._request, usage)})

    def end(self, usage: Usage, metrics: Mapping[str, object] | None) -> bytes:
        """See `AnswerWriter`."""
        return _last_event(self._request, self._head, usage, metrics=metrics) + DONE

    def body(
        self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object] | None
    ) -> Mapping[str, object]:
        """See `AnswerWriter`."""
        rendered = []
        for index, choice in enumerate(choices):
            content = choice.content if choice.content or not choice.tool_calls else None
            message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning:
                message["reasoning"] = choice.reasoning
            if choice.tool_calls:
                message["tool_calls"] = [
                    {
                        "id": self._call_id(index, number),
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for number, call in enumerate(choice.tool_calls)
                ]
            rendered.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice.pieces),
                    "finish_reason": choice.finish_reason,
                    **_token_fields(self._request, choice.pieces),
                }
            )
        return {**self._head, "choices": rendered, "usage": usage.to_dict(), **_metrics(metrics)}

    def _call_delta(self, choice: int, call: ToolCallDelta) -> dict[str, object]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": self._call_id(choice, call.index), "type": "function", "function": function}

    def _logprobs(self, pieces: Sequence[TokenPiece]) -> dict[str, object] | None:
        if not self._request.logprobs or not pieces:
            return None
        num_top = self._request.top_logprobs or 0
        content = [
            {
                **self._one(piece.token, piece.logprob),
                "top_logprobs": [self._one(token, logprob) for token, logprob in piece.top[:num_top]],
            }
            for piece in pieces
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float | None) -> dict[str, object]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


Streamed = CompletionRequest | ChatRequest


def _shows_tokens(request: Streamed) -> bool:
    return request.return_token_ids or request.return_token_origins


def _token_fields(request: Streamed, pieces: Sequence[TokenPiece]) -> dict[str, object]:
    """What is said about single tokens, where it is asked for: vLLM's ``token_ids``, and our own origins."""
    fields: dict[str, object] = {}
    if request.return_token_ids:
        fields["token_ids"] = [piece.token for piece in pieces]
    if request.return_token_origins:
        fields["token_origins"] = [{"text": piece.text, "origin": piece.origin} for piece in pieces]
    return fields


def _stream_usage(request: Streamed, usage: Usage) -> dict[str, object]:
    options = request.stream_options
    if not options.include_usage:
        return {}
    return {"usage": usage.to_dict() if options.continuous_usage_stats else None}


def _last_event(
    request: Streamed, head: Mapping[str, object], usage: Usage, *, metrics: Mapping[str, object] | None
) -> bytes:
    if not request.stream_options.include_usage:
        return b""
    return event({**head, "choices": [], "usage": usage.to_dict(), **_metrics(metrics)})


def _metrics(metrics: Mapping[str, object] | None) -> dict[str, object]:
    return {} if metrics is None else {"metrics": metrics}
