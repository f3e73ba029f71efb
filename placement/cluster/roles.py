"""What a worker's process runs, by lazy path: workers know no decoder, and what they run knows no process.

A maker is called in the new process, after its environment was checked and its cores were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.placement.remote.server import DrafterPool

Settings = Mapping[str, object]
"""Plain values, as JSON has them: they cross processes as text."""

MAKERS: dict[str, str] = {"target": "paceline.workers.hosting:target", "draft": "paceline.workers.hosting:draft"}
"""The default for each role."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What a round added to one request, as it travels to the caller."""

    index: int
    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None


class Target(Protocol):
    """What a target's maker gives: something that generates."""

    def stream(
        self, ticket: str, prompts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]], *, ask: Settings
    ) -> Generator[TokenDelta, None, None]:
        """Continue prompts of which ``emitted`` was handed out before; yields only what is new. From any thread."""

    def leave(self, ticket: str) -> None:
        """Nobody wants the stream with that ticket any more."""

    def progress(self) -> int:
        """A number that grows while anybody is served."""

    def statistics(self) -> Settings:
        """Since the target was last idle; complete when it is idle again."""


MakeTarget = Callable[[Settings, Drafter | None], Target]
MakeDrafters = Callable[[Settings], DrafterPool]


def maker(path: str) -> Callable[..., object]:
    """The function that ``module:name`` means.

    Raises:
        ConfigurationError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        found: Callable[..., object] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"{path!r} names no function ({error}); write module:function") from error
    return found
