"""What a worker's process runs, by lazy path: workers know no decoder, and what they run knows no process.

A maker is called in the new process, after its environment was checked and its cores were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter

if TYPE_CHECKING:
    from paceline.placement.remote.server import DrafterPool

Settings = Mapping[str, object]
"""Plain values, as JSON has them: they cross processes as text."""

MAKERS: dict[str, str] = {
    "target": "paceline.workers.target:make_target",
    "draft": "paceline.workers.draft:make_drafters",
}
"""The default for each role."""


CALL_PARAMS = "paceline.workers.calls:call_params"
"""Makes the parameters of a call from a value and keywords, and refuses what cannot be sent to another process."""


class TokenDelta(Protocol):
    """What a round added to one request; `paceline.outputs.RequestOutput` is one.

    index          of the request in its call
    tokens         new ids, in order
    accepted       how many of them were drafted
    finish_reason  with the last delta of a request
    """

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def accepted(self) -> int: ...

    @property
    def finish_reason(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A call to a target as it crosses processes; after a fault the same again, with what it has emitted by then.

    ticket   names this attempt, so that it can be aborted
    prompts  ids of all requests of the call
    params   `paceline.engine.request.SamplingParams` of all of them
    emitted  tokens that each request has handed out before
    rows     the requests that are not finished
    """

    ticket: str
    prompts: tuple[tuple[int, ...], ...]
    params: object
    emitted: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]


class Target(Protocol):
    """What a target's maker gives: something that generates."""

    def stream(self, request: GenerateRequest) -> Generator[TokenDelta, None, None]:
        """Continue the requests in ``rows``; yields only tokens that were not emitted before. From any thread."""

    def abort(self, ticket: str) -> None:
        """End the stream with that ticket, and free its slots."""

    def progress(self) -> int:
        """A number that grows while any request is served."""

    def statistics(self) -> Settings:
        """Since the target was last idle; complete when it is idle again."""


MakeTarget = Callable[[Settings, Drafter | None], Target]
MakeDrafters = Callable[[Settings], "DrafterPool"]


def maker(path: str) -> Callable[..., object]:
    """The function that ``module:name`` means.

    Raises:
        ConfigurationError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        function: Callable[..., object] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{path!r} names no function ({error}); write module:function") from error
    return function
