"""The contracts between the parts of a round. Optional methods have a default, so that a fake is short.

    proposal = drafter.propose(commit); commit = verifier(commit, proposal)

Plain decoding is the drafter that proposes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol, TypeVar

from paceline.core.drafter_statistics import DrafterCounts, DrafterHealth
from paceline.core.errors import ConfigurationError, RequestError
from paceline.core.types import (
    Commit,
    DraftKey,
    DraftShape,
    FeatureSpec,
    PrefillResult,
    Proposal,
    RoundLimits,
    RoundReport,
    SamplingKind,
    SamplingTensors,
    TokenScore,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


Reading = Generator[None, None, PrefillResult]
"""Prefill in chunks, with a pause after each but the last; `finish` runs it without pauses."""

Processor = Callable[["Tensor", "Tensor"], "Tensor"]
"""Hugging Face's logits processor: ids [1, length] int64, scores [1, V] float32 -> scores [1, V]."""


class Drafter(ABC):
    """Proposes tokens. It may be wrong, late or absent: the output tokens do not depend on it.

    A drafter stores no length: it re-reads the whole last commit.

    draft_shape    of every proposal
    reads          hidden states that it reads of the target; None = nothing. If set, commits carry features
    max_positions  number of positions of a sequence that it can follow; None = no limit. It is not called past them
    movable        whether `move_request` works; otherwise requests stay in their slots
    predicted      how many tokens of the last proposal, from the first on, are from the prediction of the slot's
                   request; None = none
    misfit_causes  what is likely wrong where its drafts are hardly ever accepted; "" = it may well miss, and nothing is
                   said
    """

    draft_shape: DraftShape
    reads: FeatureSpec | None = None
    max_positions: int | None = None
    predicted: list[int] | None = None
    misfit_causes: str = ""

    @property
    def movable(self) -> bool:
        return False

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Chain lengths that are worth a separate graph, ascending. The last is that of the draft shape."""
        return (self.draft_shape.num_draft_tokens,)

    @property
    def health(self) -> DrafterHealth | None:
        """Health of the drafter, if it is in another process."""
        return None

    @property
    def choice_counts(self) -> Mapping[str, DrafterCounts]:
        """Counts of each of several drafters, by its name, if it chooses among them."""
        return {}

    def restrict(self, slot: int, name: str) -> None:
        """Let only this drafter of ``choice_counts`` propose for the next request in a slot, until it finishes."""
        raise NotImplementedError(f"{type(self).__name__} does not choose among drafters")

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Prefill the prompt of a new request in a slot. features [S, F] of its tokens, if ``reads`` is set."""

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        """Do the work of `add_request`, with a pause after each chunk but the last."""
        self.add_request(slot, prompt, features)
        yield from ()

    def defer_request(self, slot: int, prompt: Sequence[int]) -> bool:
        """Keep the prompt of a new request until drafts are wanted for it. -> whether; False: `read_request` is due."""
        return False

    def finish_request(self, slot: int) -> None:
        """Forget the request in a slot, finished or aborted. Its cache rows may keep their contents."""

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Move everything stored for a request to a free slot; its sequence takes at most ``rows`` cache rows."""
        raise NotImplementedError(f"{type(self).__name__} is not movable")

    def update(self, commit: Commit) -> None:
        """Receive a commit. Called once for every commit, before `propose`, whether or not `propose` follows; not for
        those that a `TraceableDrafter.step` reads.
        """

    @abstractmethod
    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Propose what follows the commit. Slots that hold no request may get anything."""

    def chains(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> list[list[int]]:
        """Return the proposal of every slot as a list, for callers that join it with others; [] = nothing. Tokens past
        the limit are ignored. ConfigurationError: it was sampled from probabilities.
        """
        proposal = self.propose(commit, sampling, limits)
        if proposal.draft_probs is not None:
            raise ConfigurationError(
                "acceptor: expected 'match' for a list of drafters, got a drafter that samples from its "
                "probabilities; use acceptor='match'"
            )
        return [list(takewhile(lambda token: token >= 0, row)) for row in proposal.tokens.tolist()]

    def propose_allowed(
        self,
        commit: Commit,
        sampling: SamplingTensors,
        limits: RoundLimits,
        *,
        allowed: Callable[[int, list[int], int], Tensor | None],
    ) -> Proposal:
        """Do the work of `propose`, restricted to the allowed tokens, if the drafter can. ``allowed``: maps a slot, its
        drafted tokens and the vocabulary size to the tokens that may follow, [V] bool, or None for all.
        """
        return self.propose(commit, sampling, limits)

    def shortened(self, length: int) -> Drafter:
        """Return this drafter with shorter proposals of ``length`` tokens, on the same state; ConfigurationError: it
        has one length only.
        """
        raise ConfigurationError(
            f"k: expected one number, since {type(self).__name__} has one draft length, got several; give one "
            "number, or use a draft model or 'ngram'"
        )


class TraceableDrafter(Drafter):
    """A drafter whose proposing is one traceable step, so that it can share a graph with the verifier."""

    @property
    @abstractmethod
    def state(self) -> nn.Module:
        """Module with the weights and caches of its steps. Drafters of one state share steps."""

    @abstractmethod
    def bucket(self, rows: int) -> int:
        """Return the bucket of its cache for sequences that need ``rows`` rows: how many positions its step reads."""

    @abstractmethod
    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        """Return the step of a bucket, for rounds of a sampling mode: the ``kind`` of its `SamplingTensors`.

        forward(tokens, count, first_row, params, seeds, *features) -> (drafts [B, N],), followed by parents [B, N] for
        a dynamic draft shape, and by the probabilities [B, N, V] if they are sampled. Its parameters and buffers are
        its state. A step with an attribute ``takes_limit`` also takes ``limit`` [B] int32, the limits of a round, and
        skips drafts after them.
        """

    @abstractmethod
    def step_key(self, bucket: int) -> DraftKey:
        """Return the key that distinguishes the step of a bucket from this drafter's other steps."""

    @abstractmethod
    def cache_key(self) -> dict[str, object]:
        """Return all values other than the source that a graph with this step depends on."""

    @abstractmethod
    def catch_up(self) -> None:
        """Read the commits of `update` that no proposal followed. Called, in place of `update`, before the first round
        after them in which the step reads the newest commit itself.
        """


class Verifier(ABC):
    """The target's side of a round: decoder, probabilities, acceptance and compaction as one step.

    movable  whether `move_request` works
    scores   of the tokens of the last call, for every slot whose request needs them; the reader sets it to None
    """

    movable: bool = False
    scores: list[list[TokenScore]] | None = None

    @abstractmethod
    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Prefill a slot and sample the first token. ``sampling`` has one row, the slot's."""

    def finish_request(self, slot: int) -> None:
        """Forget the request in a slot."""

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Move everything stored for a request to a free slot; its sequence takes at most ``rows`` cache rows."""
        raise NotImplementedError(f"{type(self).__name__} is not movable")

    @abstractmethod
    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Verify a proposal; None = nothing is proposed. Several plain steps in one graph are also a verifier, which
        never receives a proposal: it commits up to ``limits.max_accept + 1`` tokens in every slot.
        """

    def fused(
        self,
        drafter: TraceableDrafter,
        commit: Commit,
        *,
        sampling: SamplingTensors,
        limits: RoundLimits,
        seconds: float,
    ) -> tuple[Commit, list[RoundReport]]:
        """Draft and verify in one graph: one round, then further rounds within ``limits`` and ``seconds``,
        each on the commit of the one before it. The drafter does not see them: its step reads their commits.

        -> the last commit, valid until the call after the next, and a report of each round
        """
        raise NotImplementedError(f"{type(self).__name__} runs no drafter's step")


class TextProcessing(Protocol):
    """Logits processing of one request. ``ids`` are prompt and output so far, possibly followed by drafts: every result
    is a function of them, independent of earlier calls.
    """

    def process(self, ids: list[int], logits: Tensor) -> Tensor:
        """Return the processed logits [V] float32 that follow ``ids``; the input stays unchanged.

        Raises:
            SamplingError: a processor returned something that is not logits, or a grammar takes too long.
        """

    def allowed(self, ids: list[int], size: int) -> Tensor | None:
        """Return the mask of the ``size`` tokens that may follow: [V] bool; None = all of them."""

    def continued(self, ids: list[int], draft: Sequence[int], limit: int) -> list[int]:
        """Cut a draft at the first forbidden token, then add forced tokens; at most ``limit`` tokens."""


class HostText(Protocol):
    """The sequence in a slot, for a verifier that decides it token by token on the host.

    text           prompt and output so far
    prompt_length  where the output begins
    processing     logits processing of its next token; None = nothing
    num_logprobs   number of the model's most likely tokens reported at each position; None = no log-probabilities
    num_prompt_logprobs  the same for the tokens of its prompt
    prediction     expected ids of its output
    output_scores  whether the log-probability of each token in its processed logits is reported
    """

    text: list[int]
    prompt_length: int
    processing: TextProcessing | None
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    prediction: Sequence[int]
    output_scores: bool

    def append(self, token: int) -> object:
        """Add a token; return something true if the sequence stops with it."""

    def fail(self, error: RequestError) -> None:
        """Stop the sequence with an error, without another token."""


Result = TypeVar("Result")


def finish(reading: Generator[None, None, Result]) -> Result:
    """Run a generator to its end without pauses; return its result."""
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # a generator of that type returns it
