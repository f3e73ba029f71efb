"""A rule of the user's own: one class in one file, in every mode that it declares, and refused in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.acceptance.base import AcceptanceRule, Needs, TargetView
from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Accepted, Proposal
from tests.fakes import Checked, TableDecoder, near, table

V = 12
TARGET = table(V, seed=0, spread=2.0)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6]]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Accept every drafted token to which the target gives at least this probability. Lossy; chains only."""

    least: float

    name: ClassVar[str] = "at-least"
    needs: ClassVar[Needs] = "both"
    draft_probs: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = False
    on_host: ClassVar[bool] = False

    @property
    def cache_key(self) -> str:
        return f"at-least {self.least}"

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        assert view.probs is not None
        assert view.choices is not None
        drafts = proposal.tokens
        slots, nodes = drafts.shape
        ids = drafts.clamp(min=0, max=view.probs.shape[-1] - 1).long().unsqueeze(-1)
        good = (view.probs[:, :nodes].gather(2, ids).squeeze(-1) >= self.least) & (drafts != PAD)
        standing = (~good).float().cumsum(-1) == 0
        count = standing.float().sum(-1).int()
        rows = torch.arange(1, nodes + 1, dtype=torch.int32, device=drafts.device).expand(slots, nodes)
        token = view.choices.gather(1, count.long().unsqueeze(1)).squeeze(1)
        return Accepted(torch.where(standing, rows, PAD), count, token)


def decoders() -> tuple[TableDecoder, TableDecoder]:
    draft = TableDecoder(near(TARGET, seed=1, spread=0.6), slots=3, kv_buckets=(256,))
    return draft, TableDecoder(TARGET, slots=3, kv_buckets=(256,))


@pytest.mark.parametrize("fused", [None, False])
def test_a_rule_of_the_user_s_own_decides(fused: bool | None) -> None:
    draft, target = decoders()
    assert isinstance(AtLeast(0.5), AcceptanceRule)
    everything = Checked(draft, target, k=3, acceptor=AtLeast(0.0), fused=fused)
    everything.sample(PROMPTS, max_new_tokens=40, do_sample=True, seed=1)
    statistics = everything.statistics
    assert statistics.tau == pytest.approx(4.0, abs=0.3)
    assert (statistics.acceptor, statistics.lossy) == ("at-least", True)
    draft, target = decoders()
    nothing = Checked(draft, target, k=3, acceptor=AtLeast(1.1), fused=fused)
    sequences = nothing.sample(PROMPTS, max_new_tokens=40, do_sample=True, seed=1)
    assert nothing.statistics.tau == 1.0
    plain = Checked(None, decoders()[1]).sample(PROMPTS, max_new_tokens=40, do_sample=True, seed=1)
    assert torch.equal(sequences, plain), "a rule that accepts nothing leaves the target's own choices"


def test_what_it_declares_is_kept() -> None:
    draft, target = decoders()
    generator = SpeculativeGenerator(draft, target, k=3, acceptor=AtLeast(0.5))
    with pytest.raises(ConfigurationError, match="'at-least' decides on the device"):
        generator.sample(PROMPTS, repetition_penalty=1.5)
    with pytest.raises(ConfigurationError, match="is unknown"):
        SpeculativeGenerator(draft, target, acceptor=AtLeast)  # type: ignore[arg-type]
