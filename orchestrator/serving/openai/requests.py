"""POST /v1/completions, /v1/chat/completions, /v1/responses, /tokenize and /detokenize.

A request to /v1/responses contains the whole conversation, since nothing is kept. It is converted to a `ChatRequest`;
only the format of the response differs.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.serving.errors import RefusedError
from paceline.serving.openai.fields import (
    MAX_LOGPROBS,
    GenerationFields,
    IgnoredFields,
    ModelField,
    SamplingFields,
    Streamed,
    Strict,
    StructureFields,
    TokenId,
    refuse_media,
    validated,
)

DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens for completions; chat has none
MAX_PROMPTS = 2048
_Ids = Annotated[list[TokenId], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS)


class CompletionRequest(GenerationFields):
    """Request to continue prompts. Without a seed it gets one when it is parsed, so that it can be resumed."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[
        str | _Ids | Annotated[list[str], _Several] | Annotated[list[_Ids], _Several],
        Field(description=f"a string, a list of ids, or a list of 1 to {MAX_PROMPTS} strings or lists of ids"),
    ]
    max_tokens: Annotated[int, Field(ge=0, description="at least 1, or 0 with echo")] = DEFAULT_TOKENS
    echo: Annotated[bool, Field(description="true or false")] = False
    suffix: Annotated[
        Literal[""], Field(description="an empty string (insertion before a suffix is not supported)")
    ] = ""
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}")
    ] = None
    prediction: Annotated[None, Field(description="null (it is a field of chat completions)")] = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if not self.max_tokens and not self.echo:
            raise RefusedError(
                400, "max_tokens: expected at least 1 unless echo is true, got 0; raise it", param="max_tokens"
            )
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """At least one, though a response with only the prompt does not show it."""
        return max(1, self.max_tokens)

    @property
    def tokens_asked(self) -> int | None:
        """Tokens that the request names; None: it names none."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of alternatives of each token that get a log-probability; None: no log-probabilities."""
        return self.logprobs


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str

    _no_media = model_validator(mode="before")(refuse_media)


class TextContent(Strict):
    """Something with a text, whole or in parts."""

    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class FunctionCall(Strict):
    """Function call of the model. ``arguments``: a JSON object, as a string."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(TextContent):
    """One turn of a conversation. Clients send messages back as they received them, so empty extras are dropped."""

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # its older name, by which some clients send it back

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: v for name, v in fields.items() if name in cls.model_fields or v not in (None, "", [], {})}

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if "content" not in self.model_fields_set and not (self.tool_calls or self.thoughts):
            raise ValueError("content: expected a value unless the message has tool_calls, got none; add it")
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning or self.reasoning_content


class FunctionDefinition(Strict):
    """A function that the model may call. ``parameters``: a JSON schema, which required calls always follow."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Strict):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """The `function` object inside ``tool_choice``."""

    name: str


class NamedTool(Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class Prediction(TextContent):
    """Predicted output: the text that the answer resembles; it is the drafter of this request."""

    type: Literal["content"]
    content: str | list[TextPart]


class TemplateFields(Strict):
    """Input of a chat template, in addition to the messages."""

    tools: Annotated[list[Tool], Field(max_length=128, description="a list of functions")] = []
    add_generation_prompt: Annotated[
        bool, Field(description="true or false; whether the template begins the assistant's turn")
    ] = True
    continue_final_message: Annotated[
        bool, Field(description="true or false; whether the output continues the last message")
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any], Field(description="an object with further arguments of the chat template")
    ] = {}

    @property
    def opens_turn(self) -> bool:
        return self.add_generation_prompt and not self.continue_final_message

    @property
    def tools_offered(self) -> list[Tool]:
        """Tools that the template shows to the model."""
        return self.tools

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs


class ChatRequest(GenerationFields, TemplateFields):
    """Request for a response to a conversation. ``max_completion_tokens`` is the newer name of ``max_tokens`` and
    overrides it.
    """

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=4096, description="a list of messages that have a role and a content"),
    ]
    max_tokens: Annotated[int | None, Field(ge=1, description="at least 1")] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="at least 1")] = None
    logprobs: Annotated[bool, Field(description="true or false")] = False
    top_logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}")
    ] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        Field(description='"none", "auto", "required", or the name of a function as an object'),
    ] = None
    parallel_tool_calls: Annotated[bool, Field(description="true or false")] = True
    functions: Annotated[
        list[Any], Field(max_length=0, description="an empty list (give functions as tools, the newer name)")
    ] = []
    function_call: Annotated[Literal["none", "auto"], Field(description="null (give tool_choice, the newer name)")] = (
        "none"
    )
    prediction: Annotated[Prediction | None, Field(description='{"type": "content", "content": ...} with a string')] = (
        None
    )
    modalities: Annotated[
        list[Literal["text"]], Field(max_length=1, description='["text"], the only supported output')
    ] = ["text"]
    audio: Annotated[None, Field(description="null (audio is not supported)")] = None
    web_search_options: Annotated[None, Field(description="null (web search is not supported)")] = None
    reasoning_effort: Annotated[str | None, Field(description="a string, which the chat template may read")] = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs: true with it; set logprobs")
        if self.tool_choice in ("auto", "required") and not self.tools:
            raise ValueError(f"tool_choice: expected tools with {self.tool_choice!r}, got none; add tools")
        begins = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if begins and self.continue_final_message:
            message = (
                "continue_final_message: expected add_generation_prompt: false with it, got true; omit one of them"
            )
            raise RefusedError(400, message, param="continue_final_message")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools]
            if self.tool_choice.function.name not in names:
                raise ValueError(
                    f"tool_choice: expected a function in tools, got {self.tool_choice.function.name!r}; correct "
                    "the name"
                )
        if self.structured_outputs is not None and self.tool_choice not in (None, "none", "auto"):
            raise ValueError(
                "structured_outputs: expected none with a tool_choice that requires calls, got one; omit it"
            )
        strict = next((one.function.name for one in self.tools if one.function.strict), None)
        if strict is not None and self.tool_choice in (None, "auto"):  # the model is free to call or not
            message = (
                f"strict: true of the function {strict!r} needs a tool_choice that requires a call; set tool_choice "
                'to "required" or to a function, or omit strict'
            )
            raise RefusedError(400, message, param="tools")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tokens_asked(self) -> int | None:
        return self.max_new_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tools_offered(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def tool_schemas(self) -> dict[str, dict[str, Any]]:
        return {tool.function.name: tool.function.parameters for tool in self.tools_offered}

    @property
    def template_kwargs(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs


class TokenizeRequest(TemplateFields):
    """POST /tokenize, as vLLM has it: the ids of a text (``prompt``) or of a conversation; one of them is given."""

    model: ModelField
    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[
        list[Message] | None, Field(min_length=1, max_length=4096, description="a list of messages")
    ] = None
    add_special_tokens: Annotated[bool, Field(description="true or false")] = True
    return_token_strs: Annotated[bool, Field(description="true or false")] = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages, got both or neither; give one")
        other = (
            {"add_special_tokens"}
            if self.prompt is None
            else {"tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
        )
        if given := sorted(
            other & self.model_fields_set - ({"add_special_tokens"} if not self.add_special_tokens else set())
        ):
            of = "messages, whose template has them" if self.prompt is None else "a prompt, which no template reads"
            raise ValueError(f"{given[0]}: has no effect on {of}; omit it")
        return self


class TokenizeResponse(Strict):
    """The ids, how many there are, and how many the model can read."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize: the text of ids, special tokens included."""

    model: ModelField
    tokens: Annotated[list[TokenId], Field(description="a list of ids")]


class DetokenizeResponse(Strict):
    """The text."""

    prompt: str


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


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(FunctionName):
    """The one function that must be called."""

    type: Literal["function"]


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


class ResponsesRequest(SamplingFields, Streamed, StructureFields, IgnoredFields):
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
    stream_options: Annotated[ResponsesStreamOptions | None, Field(description="an object")] = None
    store: Annotated[Literal[False], Field(description="false (responses are not stored)")] = False
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

    def chat(self) -> ChatRequest:
        """Return the request as a chat request. Raises RefusedError if its items are not a conversation, or its fields
        contradict each other.
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
