"""Any error as an error object with a status, so that no request ends in a bare 500. What nobody foresaw is logged."""

from __future__ import annotations

import logging

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from paceline.core.errors import BackendError, PlacementError, RequestError
from paceline.serving.asks import RefusedError

log = logging.getLogger("paceline")

_GONE = "model_unavailable"


def refusal(error: Exception) -> RefusedError:
    """What whoever asked is told: 400 for the request's own fault, 503 where a process is gone, else 500."""
    cause = error.cause if isinstance(error, RayTaskError) else error  # what was raised in another process
    if isinstance(cause, RefusedError):
        return cause
    if isinstance(cause, RequestError):
        return RefusedError(400, str(cause))
    if isinstance(cause, PlacementError | BackendError):
        return RefusedError(503, str(cause), code=_GONE)
    if isinstance(cause, RayError | RayServeException):
        return RefusedError(503, f"the model was lost ({type(cause).__name__}); ask again", code=_GONE)
    log.error("a request failed", exc_info=error)
    return RefusedError(500, f"the server failed at this request ({type(cause).__name__}); its log says why")
