"""Outputs of a generation while it runs, and the result and statistics when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.drafter_statistics import DrafterCounts, DrafterHealth
from paceline.core.errors import RequestError
from paceline.core.types import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.engine.request import Request

FinishReason = Literal["stop", "length", "time", "criteria", "error"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Tokens that one request gained in one round.

    index          of the request in its call
    tokens         in order; never padding, never past a stop
    accepted       number of leading tokens that were drafted; the rest are bonus or recovered tokens
    finish_reason  set on the last output of a request
    logprobs       one for every token, if ``output_scores`` was set
    drafted        depth of the verified proposal; 0 = nothing was drafted
    token_logprobs   log-probabilities of the model at each token's position, if ``logprobs`` was set
    accepted_prediction_tokens, rejected_prediction_tokens   tokens drafted from the request's prediction in this round:
                   those that are in the output, and the others
    cached_tokens  with prefix caching, cached tokens of its prompt, in the first output of a request
    prompt_logprobs  of the prompt's tokens from the second on, if requested, in the first output of a request
    error          reason of the failure, if the finish reason is "error"; other requests continue
    replaced       tokens drafted at the position of the bonus or recovered token, if ``logprobs`` was set
    """

    index: int
    tokens: tuple[int, ...]
    accepted: int
    finish_reason: FinishReason | None = None
    logprobs: tuple[float, ...] | None = None
    drafted: int = 0
    token_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: RequestError | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cached_tokens: int | None = None
    replaced: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(slots=True)
class Statistics:
    """Counts over all requests of a call, and its times. Names follow vLLM's speculative decoding metrics.

    num_rounds                   verifications, counted per request that took part; each of several plain steps in one
                                 graph counts
    num_drafts                   those in which tokens were drafted for the request
    num_draft_tokens             tokens proposed
    num_accepted_tokens          proposed tokens that are in the output; those after a stop are not counted
    num_draft_tokens_per_pos     drafts that had a token at this position (first = index 0)
    num_accepted_tokens_per_pos  drafts whose token at this position was accepted
    draft_lengths                length chosen for every round of the batch, if every round chooses one
    new_tokens                   tokens of all outputs
    prefix_cache_queries         with prefix caching, tokens of all prompts
    prefix_cache_hits            those that were cached
    *_seconds                    time in prefill, drafting, verification and everything else (host)
    drafter_health               of a drafter in another process, during this call; None for one in this process
    drafters                     counts of each drafter of a choice during this call, by its name; empty without one
    acceptor                     name of the acceptance rule: "match", "reject", "typical", "synthetic" or a user's rule
    lossless                     whether the acceptance rule preserves the target distribution
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    new_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    drafter_health: DrafterHealth | None = None
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)
    acceptor: str = "match"
    lossless: bool = True

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens of a round, the target's own included: 1 + num_accepted_tokens / num_rounds."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per round in which tokens were drafted: 1 + num_accepted_tokens / num_drafts, as in vLLM."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def tau(self) -> float:
        """The papers' name for `mean_acceptance_length`."""
        return self.mean_acceptance_length

    @property
    def acceptance_rate(self) -> float:
        """num_accepted_tokens / num_draft_tokens; 0 if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_histogram(self) -> list[int]:
        """Number of drafts with 0, 1, 2, ... accepted tokens. Accepted tokens are always the first of a draft."""
        at_least = [self.num_drafts, *self.num_accepted_tokens_per_pos, 0]
        return [more - fewer for more, fewer in pairwise(at_least)]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, the derived ones included."""
        names = [name for name in self.__slots__ if not name.startswith("_")]
        return {name: getattr(self, name) for name in names} | {
            "tokens_per_round": self.tokens_per_round,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tau": self.tau,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
            "drafter_health": None if self.drafter_health is None else self.drafter_health.to_dict(),
            "drafters": {name: counts.to_dict() for name, counts in self.drafters.items()},
        }

    def plus(self, other: Statistics) -> Statistics:
        """Return the sums of counts and seconds; not the draft lengths, which grow with every round."""

        def added(name: str) -> Any:
            one, two = getattr(self, name), getattr(other, name)
            return [a + b for a, b in zip_longest(one, two, fillvalue=0)] if isinstance(one, list) else one + two

        apart = ("draft_lengths", "drafter_health", "drafters", "acceptor", "lossless")
        return Statistics(**{name: added(name) for name in self.__slots__ if name not in apart})

    def count(self, drafted: int, accepted: int, *, rounds: int = 1) -> None:
        """Add one round of one request, or several plain ones that ran in one graph."""
        self.num_rounds += rounds
        if not drafted:
            return
        self.num_drafts += 1
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
    lengths         number of real ids in each row
    finish_reasons  "stop" (an eos id or a stop string), "length", "time" or "criteria"
    logprobs        for every row the log-probability of each new token, if ``output_scores`` was set: softmax of
                    the processed logits, before temperature and filters
    statistics      counts and times
    token_logprobs  for every row the model's log-probabilities at each new token's position, if ``logprobs`` was set
    prompt_logprobs  for every row the same for its prompt's tokens from the second on, if ``prompt_logprobs`` was set
    """

    sequences: Tensor
    lengths: list[int]
    finish_reasons: list[FinishReason]
    logprobs: list[list[float]] | None
    statistics: Statistics
    token_logprobs: list[list[TokenLogprobs]] | None = None
    prompt_logprobs: list[list[TokenLogprobs]] | None = None

    @classmethod
    def collect(
        cls, requests: Sequence[Request], outputs: Iterable[RequestOutput], *, pad_token_id: int, statistics: Statistics
    ) -> GenerationResult:
        """Combine the outputs of all requests; raise the error of one that failed."""
        import torch

        texts = [list(request.prompt) for request in requests]
        token_logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        of_prompts: list[list[TokenLogprobs]] = [[] for _ in requests]
        reasons: list[FinishReason] = ["length"] * len(requests)
        for output in outputs:
            texts[output.index] += output.tokens
            if output.error is not None:
                raise output.error
            if output.logprobs is not None:
                logprobs[output.index] += output.logprobs
            token_logprobs[output.index] += output.token_logprobs or ()
            of_prompts[output.index] += output.prompt_logprobs or ()
            if output.finish_reason is not None:
                reasons[output.index] = output.finish_reason
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        rows = torch.tensor([text + [pad_token_id] * (longest - len(text)) for text in texts])
        scores = logprobs if requests[0].output_scores else None
        of_model = token_logprobs if requests[0].num_logprobs is not None else None
        scored = of_prompts if requests[0].num_prompt_logprobs is not None else None
        return cls(rows, lengths, reasons, scores, statistics, of_model, scored)
