"""What a generation gives back: events while it runs, a result and statistics when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from paceline.core.drafter_health import DrafterHealth

FinishReason = Literal["stop", "length", "time", "criteria"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Tokens that one request gained in one round.

    index          of the request
    tokens         in order; never padding, never past a stop
    accepted       how many of them, from the first on, were drafted; the rest is the target's own
    finish_reason  set on the last event of a request
    logprobs       one for every token, if scores were asked for
    """

    index: int
    tokens: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[float, ...] | None = None


@runtime_checkable
class ReportsHealth(Protocol):
    """A drafter that knows how it is doing."""

    @property
    def health(self) -> DrafterHealth | None: ...


@dataclass(slots=True)
class Statistics:
    """Counts over all requests of a call, and where its time went.

    rounds                  verifications, counted for every request that took part in one; several plain steps in
                            one graph are as many
    num_draft_tokens                 tokens proposed
    num_accepted_tokens                proposed tokens that are in the output; those accepted but cut by a stop are not
                                       counted
    num_accepted_tokens_per_pos   the same, by place in the proposal (first = index 0)
    num_draft_tokens_per_pos    proposals that had this place
    acceptor                the acceptance rule: "match", "reject", "typical", "synthetic", or the name of another rule
    lossy                   whether that rule lets the text leave the target's distribution
    draft_lengths                   depth chosen for every round of the batch, if it is chosen anew every time
    *_seconds               time in prefill, drafting, verification and everything else (host)
    drafter_health                  of a drafter in another process, during this call; None for one in this process
    """

    rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    drafter_health: DrafterHealth | None = None
    acceptor: str = "match"
    lossy: bool = False

    @property
    def tau(self) -> float:
        """Mean tokens per round, the target's own one included: 1 + accepted / rounds. 1 without rounds."""
        return 1 + self.num_accepted_tokens / self.rounds if self.rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, ``tau`` and ``acceptance_rate`` included."""
        names = [name for name in self.__slots__ if not name.startswith("_")]
        return {name: getattr(self, name) for name in names} | {
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "health": None if self.drafter_health is None else self.drafter_health.to_dict(),
        }

    def count(self, drafted: int, accepted: int, *, rounds: int = 1) -> None:
        """One round of one request, or several plain ones that ran in one graph."""
        self.rounds += rounds
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        proposed, stood = self.num_draft_tokens_per_pos, self.num_accepted_tokens_per_pos
        if missing := [0] * (drafted - len(proposed)):
            proposed += missing
            stood += missing
        for place in range(drafted):
            proposed[place] += 1
        for place in range(accepted):
            stood[place] += 1


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Everything about a call of ``sample``.

    sequences       [B, longest] int64, prompts included, rows padded on the right with the pad id
    lengths         how many ids of each row are real
    finish_reasons  "stop" (an eos id or a stop string), "length", "time" or "criteria"
    logprobs        for every row the log-probability of each new token, when ``output_scores`` was set: softmax of
                    the processed logits, before temperature and filters
    statistics      counts and times
    """

    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[FinishReason]
    logprobs: list[list[float]] | None
    statistics: Statistics
