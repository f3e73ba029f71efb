"""The contracts between the parts of a round. One or two methods each, so that a fake is a page.

    proposal = drafter.propose(commit); commit = verifier(commit, proposal)

Plain decoding is the drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from paceline.core.errors import RequestError
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
)

if TYPE_CHECKING:
    from torch import Tensor, nn


Reading = Generator[None, None, PrefillResult]
"""Reads a prompt in pieces, with a pause after each but the last; `finish` goes without them."""

Processor = Callable[["Tensor", "Tensor"], "Tensor"]
"""Hugging Face's logits processor: ids [1, length] int64, scores [1, V] float32 -> scores [1, V]."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. It may be wrong, late or absent: the tokens a user gets do not depend on it.

    A drafter keeps no length of its own: it re-reads the whole last commit.
    """

    @property
    def draft_shape(self) -> DraftShape:
        """The shape of every proposal."""

    @property
    def reads(self) -> FeatureSpec | None:
        """What it reads of the target besides tokens; None = nothing. If set, commits carry features."""

    @property
    def max_positions(self) -> int | None:
        """How many positions of a text it can follow; None = no limit. Past it nothing is asked of it."""

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """A request takes a slot: read its prompt. features [S, F] of its tokens, if this drafter ``reads`` any."""

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done, finished or aborted: forget it. Its cache rows may keep what they hold."""

    def update(self, commit: Commit) -> None:
        """See a commit. Called once for every commit, before `propose`, whether or not `propose` follows; not for those
        that a `TraceableDrafter.step` reads.
        """

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Propose what follows the commit. Slots that hold no request may get anything."""


@runtime_checkable
class Shortens(Protocol):
    """A drafter that can also draft fewer tokens, on the same state."""

    def shortened(self, length: int) -> Drafter:
        """This drafter, proposing ``length`` tokens. The two share their state."""


@runtime_checkable
class ReportsConfidence(Protocol):
    """A drafter of chains that ends a proposal before the first token it is less sure of than a threshold."""

    confidence_threshold: float

    def propose_with_confidence(
        self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits
    ) -> tuple[Proposal, Tensor]:
        """As `Drafter.propose` without any threshold. -> also the largest probability at every place, [B, k] float32,
        with which a threshold is compared.
        """


@runtime_checkable
class DraftsUnderMask(Protocol):
    """A drafter that can choose among the tokens that may follow alone."""

    def propose_allowed(
        self,
        commit: Commit,
        sampling: SamplingTensors,
        limits: RoundLimits,
        *,
        allowed: Callable[[int, list[int], int], Tensor | None],
    ) -> Proposal:
        """As `Drafter.propose`. ``allowed``: from a slot, tokens drafted for it and the size of the vocabulary to
        which tokens may follow, [V] bool, or None for all.
        """


@runtime_checkable
class Varies(Protocol):
    """A drafter whose proposals are often shorter than its draft shape."""

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Lengths that are worth a graph of their own, ascending. The last is that of the draft shape."""


@runtime_checkable
class Guesses(Protocol):
    """A drafter whose chains are lists before they are a tensor: who joins them with others takes the lists."""

    def guess(self, limits: Sequence[int]) -> list[list[int]]:
        """What follows every slot's text as of the last commit; [] = nothing. More than its limit is of no use."""


@runtime_checkable
class TraceableDrafter(Drafter, Protocol):
    """A drafter whose proposing is one traceable step, so that it can share a graph with the verifier."""

    @property
    def state(self) -> nn.Module:
        """What holds the weights and caches of its steps. Drafters of one state share steps."""

    def bucket(self, rows: int) -> int:
        """The bucket of its cache for texts that need so many rows: how many positions its step reads."""

    def step(self, bucket: int, kind: SamplingKind) -> nn.Module:
        """The step of a bucket, for rounds of a kind of sampling: the ``kind`` of its `SamplingTensors`.

        forward(tokens, count, first_row, params, seeds, *features) -> (drafts [B, N],), followed by parents [B, N] for
        a dynamic draft shape, and by the probabilities [B, N, V] if they are drawn. Its parameters and buffers are
        its state.
        """

    def step_key(self, bucket: int) -> DraftKey:
        """What tells the step of a bucket from every other step of this drafter."""

    def cache_key(self) -> dict[str, object]:
        """All that a graph with this step in it depends on besides the source."""

    def catch_up(self) -> None:
        """Read the commits of `update` that nothing was proposed upon. Called, in place of `update`, before a round in
        which the step reads the newest commit itself.
        """


@runtime_checkable
class ReadsInChunks(Protocol):
    """A drafter that reads a prompt piece by piece."""

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        """As `Drafter.add_request`, with a pause after each piece but the last."""


class Verifier(Protocol):
    """The target's side of a round: decoder, probabilities, acceptance and compaction as one step."""

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt into a slot and pick the first token. ``sampling`` has one row, the slot's."""

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done: forget it."""

    def __call__(
        self, commit: Commit, proposal: Proposal | None, sampling: SamplingTensors, limits: RoundLimits
    ) -> Commit:
        """Verify a proposal; None = nothing is proposed."""


class FusedVerifier(Verifier, Protocol):
    """A verifier that can run a drafter's step inside its own."""

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


class AutoregressiveTarget(Protocol):
    """A target that decodes several tokens at a call, by itself."""

    def prefill(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt into a slot and pick the first token."""

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done: forget it."""

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Commit:
        """Up to ``limits.max_accept + 1`` tokens in every slot."""


class Round(Protocol):
    """From what was last committed to what is committed next."""

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt into a slot. Other slots may go through rounds in its pauses."""

    def finish_request(self, slot: int) -> None:
        """The request in a slot is done, or `start` failed for it: both sides forget it."""

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round, or as many as ``limits`` allows."""


@runtime_checkable
class MovesRequests(Protocol):
    """A drafter, a verifier or a round whose requests can go to another slot, so that those in use come first.

    movable  whether all of its parts can
    """

    @property
    def movable(self) -> bool: ...

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Give all that is kept of the request in a slot to a free one; its text takes at most ``rows`` cache rows."""


def movable(part: object) -> bool:
    """Whether requests can go to another slot, as far as this part is concerned."""
    return isinstance(part, MovesRequests) and part.movable


def move_request(parts: Iterable[object], slot: int, to: int, *, rows: int) -> None:
    """Do so in all of these parts, which can."""
    for part in parts:
        assert isinstance(part, MovesRequests), "who is not movable is not asked"
        part.move_request(slot, to, rows)


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
    processing     what is done to the logits of its next token; None = nothing
    num_logprobs   how many of the model's likeliest tokens are wanted at each place; None = no log-probabilities
    prediction     ids that its output will probably be
    output_scores  whether the log-probability of each token in its processed logits is wanted
    """

    @property
    def text(self) -> list[int]: ...

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
