"""The values that the parts of a round exchange, and the letters of shapes.

Glossary of shape letters, used in every docstring of the package:

    B  slots of a batch            N  proposed nodes           D  depth of a proposal (N for a chain)
    T  rows of a window, N + 1     S  length of a prompt       W  width of a commit, D + 1
    V  vocabulary                  H  hidden width             F  feature width
    P  capacity of a cache in positions

A *row* is an index along the positions of a KV cache. The token at position p of a sequence is stored in row p, and the
logits of row p predict the token at position p + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

PAD = -1
"""No token at this position. Not a legal id, since 0 is a token."""


IDLE = 1 << 30
"""Remaining tokens of a slot that holds no request."""

SamplingKind = Literal["greedy", "top-k", "full", "wide"]
"""Sampling mode of a call: the computation its rows need to sample a token, from the narrowest mode to the widest.

greedy  every row has temperature 0: the largest logit, and neither noise nor filters
top-k   every row that samples has 1 <= top-k <= `paceline.core.sampling.TOP_K_LIMIT`
full    some row that samples has top-k off: noise for the whole vocabulary
wide    some row that samples has a top-k above the limit: its tokens are also searched in the whole vocabulary
"""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of every proposal of a drafter, for which a graph is made.

    num_draft_tokens    N, number of nodes of a proposal
    depth    D, maximum number of them that one round can accept: N for a chain
    parents  of a static tree; None for a chain, or if ``dynamic``: then every proposal has separate parents
    """

    num_draft_tokens: int
    depth: int
    parents: tuple[int, ...] | None = None
    dynamic: bool = False

    @classmethod
    def chain(cls, length: int) -> DraftShape:
        """Return a chain of ``length`` nodes, each the child of the one before."""
        if not isinstance(length, int) or length < 0:
            raise ConfigurationError(f"k: expected at least 0 draft tokens per round, got {length!r}; correct it")
        return cls(length, length)

    @property
    def is_chain(self) -> bool:
        return self.parents is None and not self.dynamic

    def __str__(self) -> str:
        if self.is_chain:
            return f"chain of {self.depth}"
        kind = "dynamic tree" if self.dynamic else "tree"
        return f"{kind} of {self.num_draft_tokens}, depth {self.depth}"


@dataclass(frozen=True, slots=True)
class DraftKey:
    """Key that distinguishes a drafter's step from its other steps.

    kind     of drafter: "draft" (a model), "medusa", ...
    shape    of its proposals
    bucket   cache rows that the step reads; None = it has no cache
    drawn    whether it samples tokens and reports the probabilities
    variant  all other properties of the step
    """

    kind: str
    shape: DraftShape
    bucket: int | None = None
    drawn: bool = False
    variant: str = ""

    def __str__(self) -> str:
        parts = [str(self.shape), "drawn" if self.drawn else "", self.variant]
        place = "" if self.bucket is None else f"@{self.bucket}"
        return f"{self.kind}[{', '.join(part for part in parts if part)}]{place}"


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """Hidden states of the target that a drafter reads.

    ``layers`` names residual streams: entry i is the stream before layer i (the number of layers: after the last one,
    before the norm); they are concatenated along the last axis. Empty = the last hidden state, after the norm.
    """

    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceFeatures:
    """Features that stay on the device, where the next round reads them.

    fetch  copies them to the host, [B, W, F]; only until a round replaces them
    batch  batch rows of the graph that left them, 0 = all: the next graph can read them if it has as many
    """

    fetch: Callable[[], Tensor]
    batch: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model at a position: softmax of its raw logits at temperature 1, before any processor,
    penalty, grammar or filter, as in vLLM's ``raw_logprobs`` and OpenAI's API.

    rank  number of more likely tokens, plus 1
    top   (token, log-probability) of the most likely, descending, whether or not ``token`` is one of them
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Scores of a token that a verifier on the host committed.

    processed  log-probability in the processed logits, at temperature 1, without filters
    logprobs   log-probabilities of the model at that position, if requested
    """

    processed: float
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Result of a prefill.

    token     the first token of the output
    features  [S, F] float32, the states of the prompt's tokens, or None; the last one predicted ``token``
    scores    of that token, if its request needs them
    prompt_logprobs  of the prompt's tokens from the second on, if its request needs them
    """

    token: int
    features: Tensor | None = None
    scores: Sequence[TokenScore] = ()
    prompt_logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that the last round appended; the only type that stores a length.

    tokens    [B, W] int32, PAD after ``count``
    count     [B] int32, at least 1; or 0, with ``first_row`` 0, in slots of a partial commit that have no tokens
    first_row     [B] int32, cache row of ``tokens[:, 0]``; the sequence is ``first_row + count`` tokens long
    features  [B, W, F] or None; ``features[:, i]`` is the target's state that predicted ``tokens[:, i]``
    """

    tokens: Tensor
    count: Tensor
    first_row: Tensor
    features: Tensor | DeviceFeatures | None = None

    @property
    def states(self) -> Tensor | None:
        return self.features.fetch() if isinstance(self.features, DeviceFeatures) else self.features


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that a drafter proposes.

    tokens   [B, N] int32, parents before children, PAD = no node
    parents  parent nodes (-1 = the root, the last committed token): N of them, the same in every slot; or [B, N] int32,
             a separate tree for every slot; None = a chain
    draft_probs      [B, N, V] float32, the distribution each token was SAMPLED from; None = not sampled (argmax,
                     n-gram, heads)
    lengths  of the chains of every slot, if they were made from lists; None: to be read from the tokens
    """

    tokens: Tensor
    parents: tuple[int, ...] | Tensor | None = None
    draft_probs: Tensor | None = None
    lengths: Sequence[int] | None = None

    @classmethod
    def chains(cls, rows: Sequence[Sequence[int]], depths: Sequence[int]) -> Proposal:
        """Build chains of unequal lengths, in the smallest of these ascending ``depths`` that holds them all."""
        import torch

        longest = max(len(row) for row in rows)
        nodes = next(depth for depth in depths if depth >= longest)
        padded = [[*row, *[PAD] * (nodes - len(row))] for row in rows]
        lengths = [next((place for place, token in enumerate(row) if token < 0), len(row)) for row in rows]
        return cls(torch.tensor(padded, dtype=torch.int32).view(len(rows), nodes), lengths=lengths)


@dataclass(frozen=True, slots=True)
class Accepted:
    """Decision of an acceptance rule.

    path   [B, D] int32, rows of the window of the accepted nodes (root is row 0), PAD after ``count``
    count  [B] int32, number of accepted nodes, 0 to D
    token  [B] int32, the bonus or recovered token after them
    """

    path: Tensor
    count: Tensor
    token: Tensor


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling values of every slot as tensors, so that no value is a constant of a graph.

    params  [B, 4] float32: temperature (0 = greedy, below 0 = no request is in the slot), top-k (0 = off), top-p
            (1 = off), min-p (0 = off)
    seeds   [B, 4] int32: the 64-bit seed, mixed, in 16-bit words (`paceline.core.sampling.seed_row`)
    kind    sampling mode that a graph may assume of all rows; a wider one gives every row the same tokens. Not a
            tensor: kernels have a graph for every mode
    """

    params: Tensor
    seeds: Tensor
    kind: SamplingKind = "full"

    @property
    def seated(self) -> Tensor:
        """Flag of each slot: 1 if it holds a request, else 0; results of other slots are not used. [B] int32"""
        return (self.params[:, 0] >= 0).int()


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Limits that the host, which knows every length, sets for one round, or for several in one call.

    max_accept  maximum number of accepted nodes in each slot; graphs take it as a tensor
    max_rows    cache rows that the longest sequence needs before this round (its root included)
    used_slots  number of slots, from the first on, that hold every request that takes part: a graph may leave out
                those after them; None: any slot may hold one
    max_rounds  maximum number of rounds in one call; the next two limit those after the first
    remaining   for each slot, number of proposed tokens that could still be accepted before the first round. Each
                round's commit is subtracted, and the rest limits the next one. No round follows once it is below 0 in
                a slot, or every slot's limit is 0. `IDLE`: the slot holds no request
    end_ids     ids that may stop a sequence: no round follows one in which a sequence gained such a token
    """

    max_accept: list[int]
    max_rows: int
    used_slots: int | None = None
    max_rounds: int = 1
    remaining: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Result of a round for the host.

    tokens     that each slot gained
    drafted    depth of the proposal in each slot
    predicted  number of leading drafted tokens that are from the slot's prediction; None = none
    scores     of the tokens of every slot whose request needs them; None = of no slot
    replaced   with scores: for each slot, the tokens drafted at the position of the bonus or recovered token
    """

    tokens: list[list[int]]
    drafted: list[int]
    seconds: float
    predicted: list[int] | None = None
    scores: list[list[TokenScore]] | None = None
    replaced: list[list[int]] | None = None

    @classmethod
    def of(cls, rows: list[list[int]], seconds: float) -> RoundReport:
        """Build a report from a graph's output: for each slot tokens, PAD, their count, and the proposal's depth."""
        return cls([row[: row[-2]] for row in rows], [row[-1] for row in rows], seconds)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Rounds that ran in one call.

    commit          of the last one
    draft_seconds   time of the drafter outside the verifier's graph
    verify_seconds  time of the verifier, together with a drafter in its graph
    draft_length    draft length of these rounds, if every call chooses one
    """

    commit: Commit
    reports: list[RoundReport]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_length: int | None = None
