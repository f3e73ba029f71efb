"""What a service's processes log, as lines of JSON. Under Ray Serve they are in the file that Serve keeps for each
replica, with the id of the request; elsewhere a handler with `JsonFormatter` writes them. Not here: what is logged.
"""

from __future__ import annotations

import json
import logging

LOGGER = "paceline"

SERVE_LOGGING = {"encoding": "JSON", "enable_access_log": False}
"""Of every deployment. Serve's own access log says less than ours (`paceline.serving.middleware.AccessLog`)."""

_SERVE_LOGGER = "ray.serve"


class JsonFormatter(logging.Formatter):
    """A record as a line of JSON; of the access log, each field by itself."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "access", {}), ensure_ascii=False)


class _ToServe(logging.Handler):
    """Hands records on to Serve, which writes them with what it knows of the request."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger(_SERVE_LOGGER).handle(record)


def write_with_serve() -> None:
    """Have what this process logs, from INFO on, in the file of its replica. Once is enough; more do nothing."""
    ours = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _ToServe) for handler in ours.handlers):
        ours.addHandler(_ToServe())
        ours.setLevel(logging.INFO)
        ours.propagate = False  # else Serve has it again, from the standard error that it reads
