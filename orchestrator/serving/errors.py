"""Any error as an error object with a status, so that no request ends in a bare 500. What nobody foresaw is logged."""

from __future__ import annotations

import logging

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from paceline.core.errors import BackendError, ContextError, PlacementError, PromptError, RequestError, SamplingError
from paceline.serving.protocol import Kind, RefusedError

log = logging.getLogger("paceline")

_GONE, _TOO_LONG = "model_unavailable", "context_length_exceeded"  # the second one is OpenAI's
_PROMPT: dict[Kind | None, str] = {"completion": "prompt", "chat": "messages"}


def refusal(error: Exception, kind: Kind | None = None) -> RefusedError:
    """What whoever asked is told: 400 for the request's own fault, 503 where a process is gone, else 500.

    ``kind``: of the request, where it is known, to name the field that holds the prompt.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error  # what was raised in another process
    if isinstance(cause, RefusedError):
        return cause
    if isinstance(cause, PromptError):
        code = _TOO_LONG if isinstance(cause, ContextError) else None
        return RefusedError(400, str(cause), param=_PROMPT.get(kind), code=code)
    if isinstance(cause, RequestError):
        return RefusedError(400, str(cause), param=cause.param if isinstance(cause, SamplingError) else None)
    if isinstance(cause, PlacementError | BackendError):
        return RefusedError(503, str(cause), code=_GONE)
    if isinstance(cause, RayError | RayServeException):
        return RefusedError(503, f"the model was lost ({type(cause).__name__}); ask again", code=_GONE)
    log.error("a request failed", exc_info=error)
    return RefusedError(500, f"the server failed at this request ({type(cause).__name__}); its log says why")
