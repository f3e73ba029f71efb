"""Feeds Hugging Face streamers: the prompt, then every token by itself, then the end. Never padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import SamplingError
from paceline.engine.request import Request
from paceline.outputs import RequestOutput


class Streamer(Protocol):
    """`transformers.generation.streamers.BaseStreamer`."""

    def put(self, value: Tensor) -> object: ...

    def end(self) -> object: ...


def check(streamer: Streamer | None, rows: int) -> None:
    """Raise SamplingError for what is no streamer, and for several rows: it could not tell them apart."""
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise SamplingError(f"streamer is a {type(streamer).__name__} without the methods put(ids) and end()")
    if streamer is not None and rows != 1:
        raise SamplingError(
            f"a streamer follows one text and there are {rows} prompts; use `for event in generator.stream(...)`, "
            "whose events name their row"
        )


def feed(streamer: Streamer | None, request: Request, events: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
    """Pass events on and show them to the streamer; it is ended however the generation ends."""
    if streamer is None:
        yield from events
        return
    try:
        streamer.put(torch.tensor([request.prompt]))
        for event in events:
            for token in event.tokens:
                streamer.put(torch.tensor([token]))
            yield event
    finally:
        streamer.end()
