"""Objects that worker processes run, by lazy path: workers know no decoder, and those objects know no process.

A maker is called in the new process, after its environment was checked and its cores were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.placement.remote.server import DrafterPool

Settings = Mapping[str, object]
"""Plain values, as in JSON: they are sent between processes as text."""

MAKERS: dict[str, str] = {
    "target": "paceline.workers.target:make_target",
    "draft": "paceline.workers.draft:make_drafters",
}
"""Default maker for each role."""


MakeDrafters = Callable[[Settings], "DrafterPool"]


def maker(path: str) -> Callable[..., object]:
    """Return the function at the path ``module:name``."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., object] = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{path!r}: expected the name of a function, got {error}; write module:function"
        ) from error
    return function
