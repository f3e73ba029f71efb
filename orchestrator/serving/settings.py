"""Operator's settings of the HTTP application. See also: models and their cores (`paceline.placement.planning`)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.core.errors import ConfigurationError
from paceline.decoder.options import option
from paceline.placement.planning.yaml_file import FORBID_EXTRA

SpecMetrics = Literal["none", "summary", "detailed"]
"""Level of acceptance metrics, as in vLLM's ``--per-request-spec-decode-metrics``."""

DEFAULT_MAX_BODY = 1 << 20
DEFAULT_STREAM_INTERVAL_MS = 40.0  # an engine's call of several rounds may take a thirtieth of a second
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
MAX_STREAM_INTERVAL_MS = 1000.0  # more would not be a stream


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP application.

    api_keys            a request must have one of these; (): no key is required
    max_body_bytes      of a request; more is rejected (413) before it is read into memory
    max_sequence_tokens tokens of a prompt and its response together; None: the model's number of positions
    max_requests_per_key   requests of one API key that run or wait at the same time; None: no limit
    request_timeout_s   seconds that a response may take; None: no limit
    ping_s              seconds of silence in a stream after which a comment is sent, so that no proxy closes it
    stream_interval_ms  between the messages of a stream, with the events of all rounds since the previous one. The
                        first token, the end and errors do not wait. 0: a message for every round
    spec_metrics        acceptance metrics in responses: none, totals, or also every step
    access_log          whether every request is logged, as a line of JSON
    page                whether the page at / is served
    cors_origins        origins whose pages may use the API, except its admin routes; "*": any; (): none

    Raises:
        ConfigurationError: a value is out of range.
    """

    api_keys: tuple[str, ...] = option(
        (),
        "API key that clients must send; repeatable. The environment variable does not show up in `ps`. "
        "Default: no key.",
        names=("--api-key",),
        envvar="PACELINE_API_KEY",
    )
    max_body_bytes: int = option(DEFAULT_MAX_BODY, "Maximum size of a request body in bytes.")
    max_sequence_tokens: int | None = option(
        None, "Maximum number of tokens of a prompt and its output. Default: the model's positions."
    )
    max_requests_per_key: int | None = option(
        None, "Maximum number of concurrent requests per API key; more get status 429. Default: no limit."
    )
    request_timeout_s: float | None = option(None, "Maximum time of a request in seconds. Default: no limit.")
    ping_s: float = option(15.0)
    stream_interval_ms: float = option(
        DEFAULT_STREAM_INTERVAL_MS,
        "Minimum interval between streamed chunks in milliseconds; 0 sends one per round.",
    )
    spec_metrics: SpecMetrics = option(  # a field
        "summary",
        "Acceptance statistics in responses: none, summary or detailed.",
        names=("--per-request-spec-decode-metrics",),
    )
    access_log: bool = option(True)
    page: bool = option(True)
    cors_origins: tuple[str, ...] = option(
        (),
        "Origin whose pages may use the API, such as https://example.org, or * for any; repeatable. Default: none.",
        names=("--cors-origin",),
    )

    __pydantic_config__ = FORBID_EXTRA

    def __post_init__(self) -> None:
        if not all(self.api_keys):
            raise ConfigurationError("api_keys: expected keys that are not empty, got an empty one; remove it")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigurationError(
                    f"cors_origins: expected an origin such as https://example.org:8080, without a path, or *, got "
                    f"{origin!r}; correct it"
                )
        for name in ("max_body_bytes", "max_sequence_tokens", "max_requests_per_key"):
            limit: int | None = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigurationError(f"{name}: expected at least 1, got {limit}; raise it")
        for name, is_right, expected in (
            ("request_timeout_s", self.request_timeout_s is None or self.request_timeout_s > 0, "more than 0"),
            ("ping_s", self.ping_s > 0, "more than 0"),
            (
                "stream_interval_ms",
                0 <= self.stream_interval_ms <= MAX_STREAM_INTERVAL_MS,
                f"0 to {MAX_STREAM_INTERVAL_MS:g}",
            ),
            ("spec_metrics", self.spec_metrics in get_args(SpecMetrics), ", ".join(get_args(SpecMetrics))),
        ):
            if not is_right:
                raise ConfigurationError(f"{name}: expected {expected}, got {getattr(self, name)!r}; correct it")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
