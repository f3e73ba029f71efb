"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from paceline.serving.openai.fields import MAX_LOGPROBS, GenerationFields, TokenId
from paceline.serving.refused import RefusedError

DEFAULT_TOKENS = 16  # OpenAI's default of max_tokens for completions; chat has none
MAX_PROMPTS = 2048

Prompt = str | list[int] | list[str] | list[list[int]]


def _not_empty(value: Prompt) -> Prompt:
    """Neither a list nor one of the lists in it is empty."""
    parts = value if isinstance(value, list) else [value]
    if not parts or any(part == [] for part in parts):
        raise ValueError("expected at least one entry, got an empty list; add one")
    return value


class CompletionRequest(GenerationFields):
    """Request to continue prompts. Without a seed it gets one when it is parsed, so that its response can be
    resumed.
    """

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[
        str | list[TokenId] | Annotated[list[str] | list[list[TokenId]], Field(max_length=MAX_PROMPTS)],
        AfterValidator(_not_empty),
        Field(description=f"a string, a list of ids, or a list of at most {MAX_PROMPTS} strings or lists of ids"),
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
        _ = self.structured  # rejected if it is given twice
        if not self.max_tokens and not self.echo:
            raise RefusedError(
                400, "max_tokens: expected at least 1 unless echo is true, got 0; raise it", param="max_tokens"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of generated tokens: at least one, though a response with only the prompt does not show it."""
        return max(1, self.max_tokens)

    @property
    def tokens_asked(self) -> int | None:
        """Tokens that the request names; None: it names none."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of alternatives of each token that get a log-probability; None: no log-probabilities."""
        return self.logprobs

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """The same for the tokens of a prompt that is repeated."""
        return self.logprobs if self.echo else None
