"""The contracts between the parts of a round. What a part need not do has a default, so that a fake is a page.

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
    RoundResult,
    SamplingKind,
    SamplingTensors,
    TokenScore,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


Reading = Generator[None, None, PrefillResult]
"""Reads a prompt in pieces, with a pause after each but the last; `finish` goes without them."""

Processor = Callable[["Tensor", "Tensor"], "Tensor"]
"""Hugging Face's logits processor: ids [1, length] int64, scores [1, V] float32 -> scores [1, V]."""


class Drafter(ABC):
    """Proposes tokens. It may be wrong, late or absent: the tokens a user gets do not depend on it.

    A drafter keeps no length of its own: it re-reads the whole last commit.

    draft_shape    of every proposal
    reads          what it reads of the target besides tokens; None = nothing. If set, commits carry features
    max_positions  how many positions of a text it can follow; None = no limit. Past it nothing is asked of it
    movable        whether `move_request` does what it says; otherwise requests stay in their slots
    predicted      how many tokens of the last proposal, from the first on, are from the prediction of the slot's
                   request; None = none
    """

    draft_shape: DraftShape
    reads: FeatureSpec | None = None
    max_positions: int | None = None
    predicted: list[int] | None = None

    @property
    def movable(self) -> bool:
        return False

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Lengths of its chains that are worth a graph of their own, ascending. The last is that of the draft shape."""
        return (self.draft_shape.num_draft_tokens,)

    @property
    def health(self) -> DrafterHealth | None:
        """How it is doing, if it is in another process."""
        return None

    @property
    def choice_counts(self) -> Mapping[str, DrafterCounts]:
        """What each of several drafters did since this one was made, by its name, if it chooses among them."""
        return {}

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """A request takes a slot: read its prompt. features [S, F] of its tokens, if this drafter ``reads`` any."""

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        """As `add_request`, with a pause after each piece but the last."""
        self.add_request(slot, prompt, features)
        yield from ()

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done, finished or aborted: forget it. Its cache rows may keep what they hold."""

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Give all that is kept of the request in a slot to a free one; its text takes at most ``rows`` cache rows."""
        raise NotImplementedError(f"{type(self).__name__} is not movable")

    def update(self, commit: Commit) -> None:
        """See a commit. Called once for every commit, before `propose`, whether or not `propose` follows; not for those
        that a `TraceableDrafter.step` reads.
        """

    @abstractmethod
    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Propose what follows the commit. Slots that hold no request may get anything."""

    def chains(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> list[list[int]]:
        """The proposal of every slot as a list, for who joins it with others; [] = nothing. More than the limit is of
        no use.

        Raises:
            ConfigurationError: it was drawn from probabilities.
        """
        proposal = self.propose(commit, sampling, limits)
        if proposal.draft_probs is not None:
            raise ConfigurationError("drafters in a list must not draw from probabilities; use acceptor='match'")
        return [list(takewhile(lambda token: token >= 0, row)) for row in proposal.tokens.tolist()]

    def propose_allowed(
        self,
        commit: Commit,
        sampling: SamplingTensors,
        limits: RoundLimits,
        *,
        allowed: Callable[[int, list[int], int], Tensor | None],
    ) -> Proposal:
        """As `propose`, by a drafter that can choose among the tokens that may follow alone. ``allowed``: from a slot,
        tokens drafted for it and the size of the vocabulary to which tokens may follow, [V] bool, or None for all.
        """
        return self.propose(commit, sampling, limits)

    def shortened(self, length: int) -> Drafter:
        """This drafter, proposing ``length`` tokens, fewer than it does. The two share their state.

        Raises:
            ConfigurationError: it has one length only.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has one draft length only; give one number as k, or a draft model or 'ngram'"
        )


class TraceableDrafter(Drafter):
    """A drafter whose proposing is one traceable step, so that it can share a graph with the verifier."""

    @property
    @abstractmethod
    def state(self) -> nn.Module:
        """What holds the weights and caches of its steps. Drafters of one state share steps."""

    @abstractmethod
    def bucket(self, rows: int) -> int:
        """The bucket of its cache for texts that need so many rows: how many positions its step reads."""

    @abstractmethod
    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        """The step of a bucket, for rounds of a kind of sampling: the ``kind`` of its `SamplingTensors`.

        forward(tokens, count, first_row, params, seeds, *features) -> (drafts [B, N],), followed by parents [B, N] for
        a dynamic draft shape, and by the probabilities [B, N, V] if they are drawn. Its parameters and buffers are
        its state.
        """

    @abstractmethod
    def step_key(self, bucket: int) -> DraftKey:
        """What tells the step of a bucket from every other step of this drafter."""

    @abstractmethod
    def cache_key(self) -> dict[str, object]:
        """All that a graph with this step in it depends on besides the source."""

    @abstractmethod
    def catch_up(self) -> None:
        """Read the commits of `update` that nothing was proposed upon. Called, in place of `update`, before a round in
        which the step reads the newest commit itself.
        """


class Verifier(ABC):
    """The target's side of a round: decoder, probabilities, acceptance and compaction as one step.

    movable  whether `move_request` does what it says
    scores   of the tokens of the last call, of every slot whose request asks for them; who takes them sets None
    """

    movable: bool = False
    scores: list[list[TokenScore]] | None = None

    @abstractmethod
    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt into a slot and pick the first token. ``sampling`` has one row, the slot's."""

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done: forget it."""

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Give all that is kept of the request in a slot to a free one; its text takes at most ``rows`` cache rows."""
        raise NotImplementedError(f"{type(self).__name__} is not movable")

    @abstractmethod
    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Verify a proposal; None = nothing is proposed. Several plain steps in one graph are a verifier too, to which
        nothing is ever proposed: it commits up to ``limits.max_accept + 1`` tokens in every slot.
        """

    def fused(
        self,
        drafter: TraceableDrafter,
        commit: Commit,
        *,
        sampling: SamplingTensors,
        limits: RoundLimits,
        seconds: float,
    ) -> RoundResult:
        """Draft and verify in one graph: one round, and as many after it as ``limits`` allows and fit into so many
        seconds, each on what the one before it committed. The drafter does not see them: its step reads what they
        commit. The last commit is good until the call after the next.
        """
        raise NotImplementedError(f"{type(self).__name__} runs no drafter's step")


class Round(Protocol):
    """From what was last committed to what is committed next."""

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt into a slot. Other slots may go through rounds in its pauses."""

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done, or `start` failed for it: both sides forget it."""

    @property
    def movable(self) -> bool:
        """Whether requests can go to another slot, so that those in use come first."""

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Give all that is kept of the request in a slot to a free one; its text takes at most ``rows`` cache rows."""

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round, or as many as ``limits`` allows."""


class TextProcessing(Protocol):
    """What a request does to the logits of its own text. ``ids`` are prompt and output so far, or with drafts behind
    them: every answer is a function of them, whatever was asked before.
    """

    def process(self, ids: list[int], logits: Tensor) -> Tensor:
        """The logits [V] float32 that follow ``ids``, processed; the ones given stay what they are.

        Raises:
            SamplingError: a processor gave what is no logits, or a grammar is too much work.
        """

    def allowed(self, ids: list[int], size: int) -> Tensor | None:
        """Which of ``size`` tokens may follow at all: [V] bool; None = all of them."""

    def continued(self, ids: list[int], draft: Sequence[int], limit: int) -> list[int]:
        """A draft up to the first token that may not follow, and what must follow then; at most ``limit`` tokens."""


class HostText(Protocol):
    """The text in a slot, for a verifier that decides it token by token on the host.

    text           prompt and output so far
    prompt_length  where the output begins
    processing     what is done to the logits of its next token; None = nothing
    num_logprobs   how many of the model's likeliest tokens are wanted at each place; None = no log-probabilities
    prediction     ids that its output will probably be
    output_scores  whether the log-probability of each token in its processed logits is wanted
    """

    @property
    def text(self) -> list[int]: ...

    @property
    def prompt_length(self) -> int: ...

    @property
    def processing(self) -> TextProcessing | None: ...

    @property
    def num_logprobs(self) -> int | None: ...

    @property
    def output_scores(self) -> bool: ...

    @property
    def prediction(self) -> Sequence[int]: ...

    def append(self, token: int) -> object:
        """Add a token; something true if the text ends with it."""

    def fail(self, error: RequestError) -> None:
        """The text cannot go on, and ends without another token."""


Result = TypeVar("Result")


def finish(reading: Generator[None, None, Result]) -> Result:
    """What a reading comes to, without pauses."""
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # a generator of that type returns it
