"""Any error as an error object with a status, so that no request ends in a bare 500. Unforeseen errors are logged."""

from __future__ import annotations

import logging

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from paceline.core.errors import BackendError, ContextError, PlacementError, PromptError, RequestError, SamplingError
from paceline.serving.protocol import ChatRequest, CompletionRequest, RefusedError

log = logging.getLogger("paceline")

_UNAVAILABLE = "model_unavailable"
_TOO_LONG = "context_length_exceeded"  # OpenAI's; its clients look for it, and shorten the prompt


def refusal(error: Exception, request: CompletionRequest | ChatRequest | None = None) -> RefusedError:
    """The error object for an error: 400 for the request's own fault, 503 where a process is gone, else 500.

    ``request``: the one that failed, where it is known, to name the field that holds the prompt.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error  # what another process raised
    if isinstance(cause, RefusedError):
        return cause
    if isinstance(cause, PromptError):
        code = _TOO_LONG if isinstance(cause, ContextError) else None
        return RefusedError(400, str(cause), param=None if request is None else request.prompt_field, code=code)
    if isinstance(cause, RequestError):
        return RefusedError(400, str(cause), param=cause.param if isinstance(cause, SamplingError) else None)
    if isinstance(cause, PlacementError | BackendError):
        return RefusedError(503, str(cause), code=_UNAVAILABLE)
    if isinstance(cause, RayError | RayServeException):
        return RefusedError(
            503, f"the model was lost ({type(cause).__name__}); send the request again", code=_UNAVAILABLE
        )
    log.error("a request failed", exc_info=error)
    return RefusedError(500, f"the server failed at this request ({type(cause).__name__}); its log says why")
