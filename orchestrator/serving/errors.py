"""Rejected requests: an error that becomes an OpenAI error object. Values only: no HTTP, no model, no Ray."""

from __future__ import annotations

import logging

from paceline.core.errors import (
    BackendError,
    ConfigurationError,
    ContextError,
    DeadlineError,
    PlacementError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingError,
)

log = logging.getLogger("paceline")

UNAVAILABLE = "model_unavailable"
QUEUE_FULL = "queue_full"
TOO_LONG = "context_length_exceeded"  # OpenAI's code; its clients recognise it, and shorten the prompt

_MAX_MESSAGE = 400  # characters of an error's message, which may quote the request
_BACK_S = 5.0  # after which a lost part may have recovered
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """Request that gets an error object.

    status         HTTP status
    param, code    as in OpenAI's error object
    retry_after_s  seconds until a retry makes sense (429, 503); None: not given
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."
        super().__init__(status, message)  # what a copy in another process is made of
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s)))}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def refusal(error: Exception, prompt_field: str | None = None) -> RefusedError:
    """Return the error object for a Paceline error: 400 for an invalid request, 503 if a part is lost, else 500.

    ``prompt_field``: the field that holds the prompt, if known. An unexpected error is logged.
    """
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, PromptError):
        code = TOO_LONG if isinstance(error, ContextError) else None
        return RefusedError(400, str(error), param=prompt_field, code=code)
    if isinstance(error, RequestError):
        return RefusedError(400, str(error), param=error.param if isinstance(error, SamplingError) else None)
    if isinstance(error, QueueFullError):
        return RefusedError(429, str(error), code=QUEUE_FULL, retry_after_s=error.retry_after)
    if isinstance(error, DeadlineError):
        return RefusedError(504, str(error), code="deadline_exceeded")
    if isinstance(error, PlacementError | BackendError):
        return RefusedError(503, str(error), code=UNAVAILABLE, retry_after_s=_BACK_S)
    if isinstance(error, ConfigurationError):  # rounds that this server's drafter or acceptance rule does not support
        return RefusedError(400, str(error))
    log.error("a request failed", exc_info=error)
    return RefusedError(500, f"the server failed at this request ({type(error).__name__}); see its log")


def model_not_found(name: str, served: list[str]) -> RefusedError:
    """Return the 404 for a model that is not served; ``served``: those that are."""
    choices = f"there are {', '.join(served)}" if served else "no model is ready"
    return RefusedError(404, f"model: {name!r} is not served; {choices}", param="model", code="model_not_found")
