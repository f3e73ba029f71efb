"""The contract of acceptance rules: their inputs, their decision, and the commit that follows from it.

A rule is a pure function of a proposal and of the target's outputs for it. It stays on the device and has static
shapes, so that it compiles into the verification graph. Rules make no probabilities: those come from
`paceline.core.probs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from paceline.core.types import PAD, Accepted, Proposal, SamplingTensors

if TYPE_CHECKING:
    from torch import Tensor

Needs = Literal["choices", "probs", "both"]


SampleTokens = Callable[..., "Tensor"]
"""`paceline.core.probs.sample_tokens`, or a kernel that gives the same tokens."""


def _sample_tokens() -> SampleTokens:
    from paceline.core.probs import sample_tokens

    return sample_tokens


@dataclass(frozen=True, slots=True)
class TargetView:
    """Target outputs for a proposal of N tokens. T = N + 1 rows: the root, then one for each proposed token.

    positions      [B, T] int32, position in the sequence of the token that each row decides
    depth          D, the maximum number of proposed tokens that can be accepted
    choices        [B, T] int32, the token that the target samples after each row; None unless the rule needs choices
    probs          [B, T, V] float32, the target's distribution after each row; None unless the rule needs them
    sample_tokens  samples tokens from logits with the noise of their positions
    """

    positions: Tensor
    sampling: SamplingTensors
    depth: int
    choices: Tensor | None = None
    probs: Tensor | None = None
    sample_tokens: SampleTokens = field(default_factory=_sample_tokens)


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides how much of a proposal is kept. A frozen dataclass with these as class attributes is the usual form."""

    @property
    def name(self) -> str:
        """Name of the rule in options and statistics."""

    @property
    def needs(self) -> Needs:
        """Target outputs that the rule needs for every row: the sampled token, the probabilities, or both."""

    @property
    def draft_probs(self) -> bool:
        """Whether it uses the distribution that drafted tokens were sampled from. Draft models report it only then."""

    @property
    def lossless(self) -> bool:
        """Whether the output follows the target's distribution."""

    @property
    def trees(self) -> bool:
        """Whether it decides on trees; otherwise only on chains."""

    @property
    def on_host(self) -> bool:
        """Whether it can be used with logits processors and scores, which decide position by position on the host.

        Then a lossless rule that needs choices keeps a drafted token that equals the choice; any other rule is called
        with one chain at a time.
        """

    @property
    def cache_key(self) -> str:
        """Values other than the source that compiled graphs depend on: the name, and every number that is part of the
        graph.
        """

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        """Decide on a proposal of N tokens. ``proposal.draft_probs`` [B, N, V] is set if ``draft_probs`` is true and
        the tokens were sampled. -> `Accepted`, whose path has ``view.depth`` entries.
        """


def keeps_tokens(rule: AcceptanceRule) -> bool:
    """Whether the output is token for token that of decoding without a drafter, for the same seed."""
    return rule.lossless and rule.needs == "choices"


def committed(proposal: Proposal, accepted: Accepted) -> Tensor:
    """Accepted tokens, then the bonus or recovered token, then PAD. -> [B, D + 1] int32."""
    import torch

    depth = accepted.path.shape[1]
    if not depth:
        return accepted.token.unsqueeze(1)
    nodes = (accepted.path - 1).clamp(min=0).to(torch.int64)
    tokens = torch.nn.functional.pad(proposal.tokens.gather(1, nodes), (0, 1), value=PAD)
    place = torch.arange(depth + 1, device=tokens.device)
    count = accepted.count.unsqueeze(1)
    after = torch.where(place == count, accepted.token.unsqueeze(1), PAD)
    return torch.where(place < count, tokens, after).to(torch.int32)
