"""Identity of a graph within its decoder, never parsed from text, and the events that a decoder reports."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from paceline.core.types import DraftKey, DraftShape, SamplingKind

Kind = Literal["prefill", "window", "compact", "verify", "autoregressive", "draft", "read", "reorder"] | str
"""Purpose of a graph. Other parts may add kinds (a self-test, a new drafter's own graphs)."""

_ROUND_KINDS = frozenset({"verify", "autoregressive"})


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The shape of a graph and the choices that are part of it.

    kind          prefill: prefill a chunk of a prompt; window: logits of a window; compact: make an accepted path
                  consecutive; verify: a round of the target; autoregressive: target passes without a draft; draft: a
                  drafter's step on its own; read: a drafter prefills; reorder: slots exchange their contents
    rows          tokens of one slot that one call computes
    bucket        cache rows that it reads
    draft_shape   shape of the proposals that it verifies
    rule          `AcceptanceRule.cache_key` of the rule that decides
    drawn         whether the proposals include the probabilities they were sampled from
    features      layers whose hidden states it returns, see `FeatureSpec`; None = no hidden states
    commit_width  token capacity of the commit that it reads
    next_width    token capacity of the commit that it makes
    kept          whether hidden states stay on the device between two calls
    draft         the drafter's step inside it
    sampling      sampling mode of its rows, on which it may rely; "full" for every round if kernels do not distinguish
                  modes; None = it samples no token
    batch         number of slots that it computes, from slot 0 (a batch bucket); 0 = all
    variant       any other difference from its siblings
    """

    kind: Kind
    rows: int = 0
    bucket: int = 0
    draft_shape: DraftShape | None = None
    rule: str = ""
    drawn: bool = False
    features: tuple[int, ...] | None = None
    commit_width: int = 0
    next_width: int = 0
    kept: bool = False
    draft: DraftKey | None = None
    sampling: SamplingKind | None = None
    batch: int = 0
    variant: str = ""

    @property
    def is_prompt(self) -> bool:
        """Whether it prefills prompts: it runs once for each prompt, on many rows."""
        return self.kind == "prefill"

    @property
    def is_round(self) -> bool:
        """Whether it runs once per few tokens of a sequence, on the target's weights."""
        return self.kind in _ROUND_KINDS

    def __str__(self) -> str:
        """Text for messages, such as ``verify[5, chain of 4, match, commit 5 to 5]@512``."""
        parts = [
            f"{self.rows}" if self.rows else "",
            "" if self.draft_shape is None else str(self.draft_shape),
            self.rule,
            "drawn" if self.drawn else "",
            "" if self.features is None else f"features {list(self.features)}" if self.features else "features",
            f"commit {self.commit_width} to {self.next_width}" if self.next_width else "",
            f"commit {self.commit_width}" if self.commit_width and not self.next_width else "",
            "kept" if self.kept else "",
            "" if self.sampling is None or self.sampling == "full" else self.sampling,
            f"{self.batch} of the slots" if self.batch else "",
            self.variant,
        ]
        inner = ", ".join(part for part in parts if part)
        own = self.kind + (f"[{inner}]" if inner else "") + (f"@{self.bucket}" if self.bucket else "")
        if self.draft is None:
            return own
        return f"{self.draft} in {own}"


log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class GraphEvent:
    """The beginning of a compilation, with a ``message``, or a graph that is ready, with the ``seconds`` it took."""

    key: GraphKey
    message: str = ""
    seconds: float = 0.0


def log_compilation(event: GraphEvent) -> None:
    """Log the start of a compilation: it may take long, and silence would look like a hang."""
    if event.message:
        log.warning(event.message)
