"""What tells a graph from every other graph of its decoder, and what a decoder tells of the graphs it makes.

A graph is asked for by this value and by nothing else. Its string form is for people and for messages: nothing reads a
string back, and files are named by a hash of what the graph depends on (`paceline.decoder.compile.cache`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from paceline.core.types import DraftKey, DraftShape, SamplingKind

Kind = Literal["prefill", "window", "compact", "verify", "autoregressive", "draft", "read", "reorder"] | str
"""What a graph does. Kinds of other parts (a self-test, a new drafter's own graphs) are as good."""

_ROUND_KINDS = frozenset({"verify", "autoregressive"})


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The shape of a graph and the choices that are part of it.

    kind          prefill: read a chunk of a prompt; window: logits of a window; compact: make an accepted path
                  consecutive; verify: a round of the target; autoregressive: target passes without a draft; draft: a
                  drafter's step by itself; read: a drafter reads a text; reorder: slots exchange what they hold
    rows          tokens of one slot that one call computes
    bucket        cache rows that it looks at
    draft_shape   of the proposals that it verifies
    rule          `AcceptanceRule.cache_key` of the rule that decides
    drawn         whether the proposals come with the probabilities they were drawn with
    features      layers whose features it gives, see `FeatureSpec`; None = no features
    commit_width  tokens for which the commit that it reads has room
    next_width    the same of the commit that it makes
    kept          whether features stay on the device between two calls
    draft         the drafter's step inside it
    sampling      the kind of sampling of its rows: what it may assume of them; "full" for every round where kernels do
                  not distinguish kinds; None = no token is chosen in it
    lines         slots that it computes, the first ones (a batch bucket); 0 = all
    variant       what else tells it from its siblings
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
    lines: int = 0
    variant: str = ""

    @property
    def is_prompt(self) -> bool:
        """Whether it reads prompts: it runs once for each, on many rows."""
        return self.kind == "prefill"

    @property
    def is_round(self) -> bool:
        """Whether it runs for every few tokens of a text, on the target's weights."""
        return self.kind in _ROUND_KINDS

    def __str__(self) -> str:
        """For people, such as ``verify[5, chain of 4, match, commit 5 to 5]@512``."""
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
            f"{self.lines} of the slots" if self.lines else "",
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
