"""POST /v1/responses, without state: every request contains the whole conversation.

A request is converted to a `ChatRequest`; only the format of the response differs (`paceline.serving.render.writers`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.serving.openai.chat import ChatRequest
from paceline.serving.openai.fields import (
    IgnoredFields,
    ModelField,
    SamplingFields,
    Strict,
    StructureFields,
    refuse_media,
    refuse_unstreamed,
    validated,
)
from paceline.serving.refused import RefusedError


class ContentPart(Strict):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []

    _no_media = model_validator(mode="before")(refuse_media)


class InputItem(Strict):
    """A message, a call that the model made, or the result of one. Only what its ``type`` has is given."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Annotated[str | None, Field(min_length=1)] = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    summary: list[Any] = []

    @model_validator(mode="after")
    def _complete(self) -> InputItem:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }[self.type]
        for name in needed:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} needs a {name}; add it")
        return self

    @property
    def text(self) -> str:
        """The whole content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or [])

    def message(self) -> dict[str, Any] | None:
        """Return the item as a chat message; None: the model reads nothing of it."""
        if self.type == "message":
            return {"role": self.role, "content": self.text}
        if self.type == "function_call":
            call = {
                "id": self.call_id,
                "type": "function",
                "function": {"name": self.name, "arguments": self.arguments},
            }
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "content": self.output, "tool_call_id": self.call_id}
        return None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class NamedFunction(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """Allowed outputs."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool = False


class ResponseTextConfig(Strict):
    """Options of the output text."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] = "medium"


class ReasoningOptions(Strict):
    """Options that are passed to the chat template, which may read them."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesStreamOptions(Strict):
    """Options of a streamed response. ``include_obfuscation`` is ignored; the last event always has the usage."""

    include_obfuscation: bool = False
    include_usage: bool = True


class ResponsesRequest(SamplingFields, StructureFields, IgnoredFields):
    """Answer. Nothing is kept: ``store`` must be left out or false, and no earlier answer can be named."""

    prompt_field: ClassVar[str] = "input"

    model: ModelField
    input: Annotated[
        str | Annotated[list[InputItem], Field(min_length=1, max_length=4096)],
        Field(description="a string or a list of items"),
    ]
    instructions: Annotated[str | None, Field(description="a text")] = None
    max_output_tokens: Annotated[int | None, Field(ge=1, description="at least 1")] = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, description="a list of functions")] = []
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | None,
        Field(description='"none", "auto", "required", or the name of a function as an object'),
    ] = None
    text: Annotated[ResponseTextConfig, Field(description="an object with a format, and verbosity medium if given")] = (
        ResponseTextConfig()
    )
    reasoning: Annotated[
        ReasoningOptions, Field(description="an object with an effort, and no summary (reasoning is returned in full)")
    ] = ReasoningOptions()
    top_logprobs: Annotated[None, Field(description="null (chat completions return log-probabilities)")] = None
    stream: Annotated[bool, Field(description="true or false")] = False
    stream_options: Annotated[ResponsesStreamOptions | None, Field(description="an object")] = None
    store: Annotated[Literal[False], Field(description="false (responses are not stored)")] = False  # type: ignore[assignment]
    previous_response_id: Annotated[
        None, Field(description="null (responses are not stored; send the whole conversation as input)")
    ] = None
    conversation: Annotated[None, Field(description="null (conversations are not stored)")] = None
    background: Annotated[Literal[False], Field(description="false (background responses are not supported)")] = False
    include: Annotated[list[str], Field(max_length=0, description="an empty list")] = []
    truncation: Annotated[Literal["disabled"], Field(description='"disabled" (inputs are never truncated)')] = (
        "disabled"
    )
    parallel_tool_calls: Annotated[bool, Field(description="true or false")] = True
    max_tool_calls: Annotated[None, Field(description="null (OpenAI's own tools are not supported)")] = None

    @model_validator(mode="after")
    def _check_stream(self) -> ResponsesRequest:
        refuse_unstreamed(self.stream, self.stream_options)
        return self

    def chat(self) -> ChatRequest:
        """Return the request as a chat request.

        Raises:
            RefusedError: its items are not a conversation, or its fields contradict each other.
        """
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [*first, *(message for item in items if (message := item.message()) is not None)]
        if not messages:
            raise RefusedError(
                400, "input: expected at least one item that the model reads, got none; add a message", param="input"
            )
        fields: dict[str, Any] = {name: getattr(self, name) for name in SamplingFields.model_fields}
        fields |= {name: getattr(self, name) for name in StructureFields.model_fields}
        form = self.text.format
        schema = {"name": form.name, "schema": form.schema_ or {}} if form.type == "json_schema" else None
        choice = self.tool_choice
        named = isinstance(choice, NamedFunction)
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        fields |= {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": choice.name}} if named else choice,  # type: ignore[union-attr]
            "response_format": {"type": form.type, "json_schema": schema},
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
            "reasoning_effort": self.reasoning.effort,
        }
        return validated(ChatRequest, fields)
