"""Options of drafters in modules that load PyTorch, for lists and checks that do not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """A drafter without options but k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipOptions:
    """``layers``: how many of the target's layers draft, from the first on; None: a quarter of them."""

    layers: int | None = None
