"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.serving.openai.chat import Message, Tool
from paceline.serving.openai.fields import ModelField, Strict, TokenId


class TokenizeRequest(Strict):
    """The ids of a text (``prompt``) or of a conversation (``messages``); one of them is given."""

    model: ModelField
    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[
        list[Message] | None, Field(min_length=1, max_length=4096, description="a list of messages")
    ] = None
    tools: Annotated[list[Tool], Field(max_length=128, description="a list of functions")] = []
    add_special_tokens: Annotated[bool, Field(description="true or false")] = True
    add_generation_prompt: Annotated[bool, Field(description="true or false")] = True
    continue_final_message: Annotated[bool, Field(description="true or false")] = False
    return_token_strs: Annotated[bool, Field(description="true or false")] = False
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="an object")] = {}

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
    """The text of ids, special tokens included."""

    model: ModelField
    tokens: Annotated[list[TokenId], Field(description="a list of ids")]


class DetokenizeResponse(Strict):
    """The text."""

    prompt: str
