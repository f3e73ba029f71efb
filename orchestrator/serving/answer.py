"""Rendering of a response: its choices, its events or its body, its counts, and the input of writers."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from paceline.core.types import TokenLogprobs
from paceline.experiments.definitions import Acceptance, Draft
from paceline.outputs import RequestOutput
from paceline.serving.openai.requests import ChatRequest, CompletionRequest
from paceline.serving.parsers import Delta, Parser, ToolCallDelta
from paceline.serving.settings import SpecMetrics
from paceline.text.stop_strings import StopStringFilter

Origin = Literal["draft", "corrected", "target"]
"""Origin of a token: an accepted draft; a recovered token after a rejected draft; or a token without a draft."""

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token of a response.

    text      text that it completed: empty if a character is incomplete or a stop string may have begun
    top       (id, log-probability) of the most likely tokens at its position, if requested
    replaced  with log-probabilities, for a recovered token: the tokens drafted at its position
    """

    token: int
    text: str
    origin: Origin
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerStep:
    """Addition to one choice.

    first          whether this holds the first token of the choice
    pieces         its tokens, where the answer shows any
    prompt         log-probabilities of the prompt's tokens from the second on, with the first step, if requested
    finish_reason  OpenAI's, with the last step of a choice
    """

    choice: int
    delta: Delta
    pieces: tuple[TokenPiece, ...]
    first: bool = False
    finish_reason: str | None = None
    prompt: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a response.

    cached_tokens     of the prompts; None: without prefix caching
    reasoning_tokens  tokens up to the end of the reasoning
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int = 0

    def to_dict(self) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        if self.reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


PartKind = Literal["reasoning", "message", "function_call"]


@dataclass(slots=True)
class OutputItem:
    """Reasoning, text, or a call of the function ``name`` with the arguments ``text``."""

    kind: PartKind
    text: str = ""
    name: str = ""


@dataclass(slots=True)
class ChoiceText:
    """A whole choice, as it adds up. ``parts``: in the order in which they were written."""

    parts: list[OutputItem] = field(default_factory=list)
    pieces: list[TokenPiece] = field(default_factory=list)
    finish_reason: str | None = None
    prompt: tuple[TokenLogprobs, ...] | None = None

    def add(self, step: AnswerStep) -> None:
        self.write("reasoning", step.delta.reasoning)
        self.write("message", step.delta.content)
        for call in step.delta.tool_calls:
            self.call(call)
        self.pieces += step.pieces
        self.prompt = step.prompt if step.first else self.prompt
        self.finish_reason = step.finish_reason or self.finish_reason

    def write(self, kind: PartKind, text: str) -> None:
        if text:
            if not self.parts or self.parts[-1].kind != kind:
                self.parts.append(OutputItem(kind))
            self.parts[-1].text += text

    def call(self, call: ToolCallDelta) -> None:
        if call.name is not None:
            self.parts.append(OutputItem("function_call", name=call.name))
        self.tool_calls[call.index].text += call.arguments

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "message")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def tool_calls(self) -> list[OutputItem]:
        return [part for part in self.parts if part.kind == "function_call"]


class AnswerWriter(Protocol):
    """Writes responses in the format of one endpoint.

    by_token  steps hold one token each, because the events are numbered and a response must be resumable
    step      returns the events of a step; empty where it shows nothing. ``usage`` counts the tokens so far
    end       returns the events after the last step
    body      returns the whole answer, where nothing is streamed
    """

    by_token: bool

    def step(self, step: AnswerStep, usage: Callable[[], Usage]) -> bytes: ...

    def end(self, usage: Usage, metrics: Mapping[str, object]) -> bytes: ...

    def body(
        self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object]
    ) -> Mapping[str, object]: ...


to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `json.dumps` makes one for every event


def event(content: Mapping[str, object], name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + to_json(content).encode() + b"\n\n"


def acceptance_metrics(drafts: Sequence[Draft], num_spec_tokens: int, level: SpecMetrics) -> Mapping[str, object]:
    """Return ``metrics.speculative_decoding`` of a response, in vLLM 0.32's schema: counts of one request, over
    verification steps with drafted tokens; empty without drafting, or if it is switched off. Definitions:
    https://docs.vllm.ai/en/v0.32.0/features/speculative_decoding/acceptance_metrics/

    ``num_spec_tokens``: maximum drafted tokens of a step, by the server's settings. ``level``: how much is reported.
    """
    if level == "none" or not num_spec_tokens:
        return {}
    figures, lengths = Acceptance(tuple(drafts), len(drafts), 0), sorted({draft.drafted for draft in drafts})
    longest = max([num_spec_tokens, *lengths])
    by_length = {
        str(length): Acceptance(tuple(one for one in drafts if one.drafted == length), 0, 0).histogram
        for length in lengths
    }
    report: dict[str, object] = {
        "mean_acceptance_length": figures.mean_acceptance_length,
        "draft_acceptance_rate": figures.draft_acceptance_rate,
        "acceptance_histogram": [*figures.histogram, *[0] * (longest + 1 - len(figures.histogram))],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": figures.num_drafts,
        "num_accepted_draft_tokens": figures.num_accepted_tokens,
        "num_draft_tokens": figures.num_draft_tokens,
        "num_spec_tokens": longest,
    }
    if level == "detailed":
        report["per_step_accepted"] = [draft.accepted for draft in drafts]
        report["per_step_drafted"] = [draft.drafted for draft in drafts]
    return {"metrics": {"speculative_decoding": report}}


class ChoiceRenderer:
    """One choice of a response: converts rounds to steps, token by token, so that the result does not depend on the
    borders of rounds.

    skip      tokens that were sent before, by another server: they are rendered, and their steps are not marked
    by_token  a step for every token
    pieces    whether steps hold the tokens themselves
    ended     whether its last step was returned; later tokens are not part of the response
    whole     all of the choice, where the answer collects it
    reasoning_tokens  tokens up to the last one that completed a part of the reasoning
    """

    def __init__(
        self, index: int, text: StopStringFilter, parser: Parser, *, skip: int, by_token: bool, pieces: bool
    ) -> None:
        self._index, self._text, self._parser = index, text, parser
        self._skip, self._by_token, self._pieces = skip, by_token, pieces
        self.tokens = self.reasoning_tokens = 0
        self.whole = ChoiceText()
        self._prompt: tuple[TokenLogprobs, ...] | None = None
        self.called = self.ended = False

    def push(self, output: RequestOutput) -> Iterator[tuple[AnswerStep, bool]]:
        """Return the steps of a round, and whether each is new to the client. Raises the error that ended the
        request.
        """
        if output.error is not None:
            raise output.error
        pieces: list[TokenPiece] = []
        delta, first = Delta(), not self.tokens
        self._prompt = output.prompt_logprobs
        for place, token in enumerate(output.tokens, 1):
            text = self._text.push(token)
            self.tokens += 1
            if self._pieces:
                pieces.append(_piece(output, place - 1, text))
            if text:
                parsed = self._parser.push(text)
                delta += parsed
                if parsed.reasoning:
                    self.reasoning_tokens = self.tokens
                self.ended = self._parser.ended
            if self.ended or (place < len(output.tokens) and (self._by_token or self.tokens == self._skip)):
                reason = "stop" if self.ended else None
                yield self._step(delta, pieces, first=first, reason=reason), self.tokens > self._skip
                if self.ended:
                    return
                pieces, delta, first = [], Delta(), False
        reason = output.finish_reason
        if reason is not None:
            self.ended = True
            rest = self._text.flush()
            parsed = (self._parser.push(rest) if rest else Delta()) + self._parser.flush()
            delta += parsed
            if parsed.reasoning:
                self.reasoning_tokens = self.tokens
            if rest and pieces:
                pieces[-1] = replace(pieces[-1], text=pieces[-1].text + rest)
        # A client that got the last token got the reason with it.
        yield self._step(delta, pieces, first=first, reason=reason), self.tokens > self._skip or not output.tokens

    def _step(
        self, delta: Delta, pieces: Sequence[TokenPiece], *, first: bool, reason: str | None = None
    ) -> AnswerStep:
        self.called = self.called or bool(delta.tool_calls)
        finish = None if reason is None else "length" if reason == "length" else "stop"
        if finish == "stop" and self.called:
            finish = "tool_calls"
        return AnswerStep(self._index, delta, tuple(pieces), first, finish, self._prompt if first else None)


def _piece(output: RequestOutput, place: int, text: str) -> TokenPiece:
    origin: Origin = "target"
    if place < output.accepted:
        origin = "draft"
    elif output.accepted < output.drafted and place == output.accepted:
        origin = "corrected"
    if output.token_logprobs is None:
        return TokenPiece(output.tokens[place], text, origin)
    logprobs, replaced = output.token_logprobs[place], output.replaced if origin == "corrected" else ()
    return TokenPiece(output.tokens[place], text, origin, logprobs.logprob, logprobs.top, replaced)


class Answer:
    """Response to a completion or a chat: receives the engine's outputs and writes them.

    prompt_tokens  of all prompts together
    metrics        makes the metrics of its drafts, which are returned only with one choice
    """

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        writer: AnswerWriter,
        choices: Sequence[ChoiceRenderer],
        *,
        prompt_tokens: int,
        metrics: Callable[[Sequence[Draft]], Mapping[str, object]],
    ) -> None:
        self._request, self._writer, self._choices, self._metrics = request, writer, choices, metrics
        self._drafts: list[Draft] = []
        self._prompt_tokens, self._prompt_only = prompt_tokens, request.tokens_asked == 0
        self._cached: int | None = None

    @property
    def sent(self) -> tuple[int, ...]:
        return tuple(choice.tokens for choice in self._choices)

    @property
    def ended(self) -> tuple[bool, ...]:
        """Whether each choice is complete, though the engine may not know of it."""
        return tuple(choice.ended for choice in self._choices)

    def push(self, outputs: Iterable[RequestOutput]) -> bytes:
        """Add the outputs of rounds; return chunks, empty if nothing is streamed."""
        events = []
        for output in outputs:
            if self._choices[output.index].ended:
                continue
            if output.drafted:
                self._drafts.append(Draft(output.drafted, output.accepted))
            if output.cached_tokens is not None and output.index % self._request.n == 0:
                self._cached = (self._cached or 0) + output.cached_tokens  # the others find it anyway
            if self._prompt_only and output.error is None:
                output = replace(output, tokens=(), accepted=0, drafted=0, finish_reason="length", token_logprobs=None)
            for step, is_new in self._choices[output.index].push(output):
                if not self._request.stream:
                    self._choices[output.index].whole.add(step)
                    continue
                written = self._writer.step(step, self._usage)
                if is_new:
                    events.append(written)
        return b"".join(events)

    def end(self) -> bytes:
        metrics = self._metrics(self._drafts) if len(self._choices) == 1 else {}
        if self._request.stream:
            return self._writer.end(self._usage(), metrics)
        body = self._writer.body([choice.whole for choice in self._choices], self._usage(), metrics)
        return to_json(body).encode()

    def _usage(self) -> Usage:
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return Usage(self._prompt_tokens, sum(self.sent), self._cached, reasoning)


class TokenAnswer:
    """Counterpart of `Answer` for a `paceline.serving.router.TokenRequest`: passes the engine's outputs on, without the
    tokens that were sent before (``skip``).
    """

    def __init__(self, num_requests: int, skip: Sequence[int]) -> None:
        self._skip, self._sent = list(skip) or [0] * num_requests, [0] * num_requests
        self._ended = [False] * num_requests

    @property
    def sent(self) -> tuple[int, ...]:
        return tuple(self._sent)

    @property
    def ended(self) -> tuple[bool, ...]:
        return tuple(self._ended)

    def push(self, outputs: Iterable[RequestOutput]) -> bytes:
        written = []
        for output in outputs:
            if output.error is not None:
                raise output.error
            before = self._skip[output.index] - self._sent[output.index]
            self._sent[output.index] += len(output.tokens)
            self._ended[output.index] = output.finish_reason is not None
            if before < len(output.tokens) or not output.tokens:
                written.append(pickle.dumps(_without_first(output, max(0, before))))
        return b"".join(written)

    def end(self) -> bytes:
        return b""


def read_outputs(data: bytes) -> Iterator[RequestOutput]:
    file = io.BytesIO(data)
    while file.tell() < len(data):
        yield pickle.load(file)


def _without_first(output: RequestOutput, count: int) -> RequestOutput:
    logprobs = None if output.logprobs is None else output.logprobs[count:]
    of_model = None if output.token_logprobs is None else output.token_logprobs[count:]
    output = replace(output, accepted=max(0, output.accepted - count), drafted=max(0, output.drafted - count))
    return replace(output, tokens=output.tokens[count:], logprobs=logprobs, token_logprobs=of_model)
