"""From a request to the ids that the model reads, by its tokenizer and chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.serving.openai.chat import ChatRequest, Message, Tool
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.parsers.reasoning import ReasoningRow, reasoning_of
from paceline.serving.parsers.tools import ToolFormat, tool_format
from paceline.serving.refused import RefusedError
from paceline.text.structured_output import ReasoningMarkers


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What a model's chat template says, and how its answers are read.

    template   its text; empty without one
    tools      the form of tool calls that it teaches, if it has a place for tools
    reasoning  its markers of reasoning
    """

    template: str = ""
    tools: ToolFormat | None = None
    reasoning: ReasoningRow | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFormat:
        """Of a tokenizer."""
        templates: Any = getattr(tokenizer, "chat_template", None)
        if not templates:
            return cls()
        # A tokenizer may have several by name; that for tools says most.
        template = templates if isinstance(templates, str) else "\n".join(map(str, dict(templates).values()))
        return cls(template, tool_format(template), reasoning_of(template))

    def markers(self, *, tools: bool) -> tuple[str, ...]:
        """Texts that parsers of answers look for, and that may be special tokens. ``tools``: whether calls may come."""
        marks = self.tools.tokens if tools and self.tools is not None else ()
        return marks if self.reasoning is None else (*marks, self.reasoning.start, self.reasoning.end)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one request.

    ids             of each
    texts           of each, where they are repeated in the answer
    in_reasoning    whether the template opened the reasoning of the answer already
    reasoning       how reasoning is marked that may come before the answer; None: there is none
    """

    ids: list[list[int]]
    texts: tuple[str, ...] = ()
    in_reasoning: bool = False
    reasoning: ReasoningMarkers | None = None

    @property
    def num_tokens(self) -> int:
        """Of all together."""
        return sum(map(len, self.ids))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for a template.

    messages  as the request has them
    tools     that the model may call
    kwargs    what else the template reads
    open      whether the assistant's turn is begun at the end
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    open: bool = True


def completion_prompts(tokenizer: Tokenizer, request: CompletionRequest) -> Prompts:
    """The prompts of a completion."""
    ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
    if not request.echo:
        return Prompts(ids)
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt)) for prompt in request.prompts]
    return Prompts(ids, tuple(text for text in texts for _ in range(request.n)))


def chat_prompts(tokenizer: Tokenizer, request: ChatRequest, form: ChatFormat) -> Prompts:
    """The prompt of a chat."""
    kwargs = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    text = chat_text(tokenizer, ChatPrompt(request.messages, request.tools_offered, kwargs), form)
    ids, row = [tokenizer.encode(text, add_special_tokens=False)], form.reasoning
    if row is None or text.rstrip().endswith(row.end):  # it was closed before it began: the model is not to reason
        return Prompts(ids)
    opened = text.rstrip().endswith(row.start)
    markers = ReasoningMarkers(row.end, "" if opened else row.start)
    return Prompts(ids, in_reasoning=opened, reasoning=markers)


def chat_text(tokenizer: Tokenizer, prompt: ChatPrompt, form: ChatFormat) -> str:
    """A conversation as the text that the model reads.

    Raises:
        RefusedError: there is no chat template, it has no place for tools, or it refuses the messages.
    """
    chat_tokenizer: Any = tokenizer
    if not form.template:
        raise RefusedError(400, "this model has no chat template; ask /v1/completions", param="messages")
    if prompt.tools and form.tools is None:
        raise RefusedError(400, "this model's chat template has no place for tools", param="tools")
    parameters = inspect.signature(chat_tokenizer.apply_chat_template).parameters
    for name in prompt.kwargs:
        if name in parameters or name == "messages":
            raise RefusedError(400, f"{name!r} cannot be given to the template", param="chat_template_kwargs")
    tools = [tool.model_dump(exclude={"function": {"strict"}}) for tool in prompt.tools] or None
    messages = [_for_template(message) for message in prompt.messages]
    try:
        return str(
            chat_tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt.open, **prompt.kwargs
            )
        )
    except Exception as error:  # templates are programs that raise what they like
        raise RefusedError(400, f"the chat template refuses these messages: {error}", param="messages") from error


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates read it: a text, and calls whose arguments are objects.

    Raises:
        RefusedError: the arguments of a call are no JSON.
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        entry["name"] = message.name
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError) as error:
                name = call.function.name
                raise RefusedError(400, f"the arguments of {name!r} are no JSON ({error})", param="messages") from error
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        entry["tool_calls"] = calls
    return entry
