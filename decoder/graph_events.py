"""What a decoder tells of the graphs it makes. Not here: making them (`paceline.decoder.decoder`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.decoder.graph_key import GraphKey

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class GraphEvent:
    """The beginning of a compilation, or a graph that is ready.

    key      which graph
    message  what is being done, for people; "" once the graph is there
    seconds  that it took to make or find it; 0 at the beginning
    """

    key: GraphKey
    message: str = ""
    seconds: float = 0.0


def log_compilation(event: GraphEvent) -> None:
    """Say what is compiled: it may take long, and silence would look like a hang."""
    if event.message:
        log.warning(event.message)
