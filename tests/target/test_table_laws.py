"""The joint distribution of three tokens, exact, in every mode of chains; and that the classic mistake would be seen.

Real verifier, drafters and rounds over table models, 50 000 slots at once or 200 000; caches check themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from paceline.core import probs
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, param_row, sampling_tensors, seed_row
from paceline.core.types import Commit, DraftShape, Proposal, RoundLimits, SamplingTensors
from paceline.draft.base import FunctionDrafter, NoDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.target.host_verifier import HostVerifier
from tests.fakes import Around, TableBody, TableDecoder, joint, misfit
from tests.target.three_tokens import CHAIN, DRAFT, MANY, PROMPT, SLOTS, TARGET, K, SlotText, V, model, three_tokens


class OtherParams(Around):
    """Drafts as it samples itself; ``honest``: it reports the distribution it drew from, not the unfiltered one."""

    inner: ModelDrafter

    def __init__(self, inner: ModelDrafter, params: Sampling, *, honest: bool = True) -> None:
        super().__init__(inner)
        self.params, self.honest = params, honest

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        own = SamplingTensors(torch.tensor([param_row(self.params)]).expand(len(sampling.seeds), 4), sampling.seeds)
        made = self.inner.propose(commit, own, bounds)
        if self.honest:
            return made
        last = commit.tokens.gather(1, (commit.count - 1).long().unsqueeze(1))
        text = torch.cat((last, made.tokens), 1).long()
        body = self.inner.decoder.body
        assert isinstance(body, TableBody)
        row = (commit.first_row + commit.count - 2).long().clamp(min=0)
        before = torch.cat((body.cache[torch.arange(len(row)), row].unsqueeze(1), text[:, :-2]), 1)
        return Proposal(made.tokens, None, torch.softmax(DRAFT[before, text[:, :-1]], -1))


@dataclass(frozen=True)
class Foreign(Drafter):
    """A drafter of someone else's, with more ids than the target: it draws from its own distribution and reports it."""

    generator: torch.Generator
    draft_shape: DraftShape = CHAIN

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        own = torch.tensor([0.3, 0.1, 0.0, 0.1, 0.0, 0.0, 0.1, 0.0, 0.2, 0.0, 0.2])
        slots = len(commit.tokens)
        drawn = torch.multinomial(own, slots * K, replacement=True, generator=self.generator)
        return Proposal(drawn.view(slots, K).to(torch.int32), None, own.expand(slots, K, len(own)))


MODES: dict[str, tuple[Callable[[], Drafter], AcceptanceRule]] = {
    "plain": (NoDrafter, Match()),
    "match, coupled draft": (lambda: model(MANY, drawn=False), Match()),
    "match, n-gram": (lambda: NgramDrafter(K), Match()),
    "reject, drawn draft": (lambda: model(MANY, drawn=True), Reject()),
    "reject, undrawn draft": (lambda: model(drawn=False), Reject()),
    "reject, function": (
        lambda: FunctionDrafter(lambda text: [(text[-1] + 1 + step) % V for step in range(K)], K),
        Reject(),
    ),
    "reject, drawn from more ids than there are": (lambda: Foreign(torch.Generator().manual_seed(5)), Reject()),
}


LAWFUL = {"match, coupled draft", "reject, drawn draft", "reject, drawn from more ids than there are"}
"""Modes whose draft follows a distribution of its own, where a small bias could hide: also taken MANY times."""


@pytest.mark.parametrize(
    ("mode", "slots"),
    [(mode, SLOTS) for mode in MODES] + [pytest.param(mode, MANY, marks=pytest.mark.full) for mode in sorted(LAWFUL)],
)
def test_the_joint_distribution_of_three_tokens_is_the_targets(mode: str, slots: int) -> None:
    make, rule = MODES[mode]
    tokens, mean = three_tokens(make(), rule, params=Sampling(temperature=1.0), slots=slots)
    assert misfit(tokens, joint(TARGET, *PROMPT[-2:])) > 1e-3
    assert (mean == 1.0) == (mode == "plain")


CUT = Sampling(temperature=1.0, top_p=0.7)
RAW = Sampling(temperature=1.0)


@pytest.mark.parametrize(
    ("theirs", "ours"), [(CUT, RAW), (RAW, CUT), (CUT, CUT)], ids=["draft cut", "target cut", "both cut"]
)
def test_a_draft_may_filter_differently_if_its_probabilities_do(ours: Sampling, theirs: Sampling) -> None:
    """Rule C4: top-p on both sides, on one or on none is exact, as long as the one drawn from is reported."""
    tokens, mean = three_tokens(OtherParams(model(drawn=True), theirs), Reject(), params=ours)
    cut = probs.apply_top_k_top_p_min_p(TARGET, sampling_tensors([ours] * V))
    assert misfit(tokens, joint(cut, *PROMPT[-2:])) > 1e-3
    assert mean > 1.5


def test_a_filtered_draft_with_unfiltered_probabilities_is_detected() -> None:
    """Rule C4, the mistake: drawn filtered, scored raw."""
    source = OtherParams(model(drawn=True), CUT, honest=False)
    tokens, _ = three_tokens(source, Reject(), params=RAW)
    assert misfit(tokens, joint(TARGET, *PROMPT[-2:])) < 1e-6


def test_out_of_range_ids_keep_the_distribution_on_the_host() -> None:
    slots = 1500  # taken one by one there
    target = TableDecoder(TARGET, slots=slots, kv_buckets=(24,))
    verifier = HostVerifier(target, CHAIN, rule=Reject(), wide=True, slots=[SlotText(PROMPT) for _ in range(slots)])
    keys = torch.tensor([seed_row(seed + (7 << 32)) for seed in range(slots)], dtype=torch.int32)
    sampling = SamplingTensors(torch.tensor([param_row(Sampling(temperature=1.0))]).expand(slots, 4), keys)
    target.body.cache[:, : len(PROMPT)] = torch.tensor(PROMPT)
    ones = torch.ones(slots, dtype=torch.int32)
    commit = Commit(ones.unsqueeze(1) * PROMPT[-1], ones, ones * (len(PROMPT) - 1))
    bounds = RoundLimits([K] * slots, len(PROMPT))
    proposal = Foreign(torch.Generator().manual_seed(6)).propose(commit, sampling, bounds)
    made = verifier(commit, proposal, sampling, bounds)
    wanted = torch.softmax(TARGET[PROMPT[-2], PROMPT[-1]].double(), -1)
    assert misfit(made.tokens[:, :1].numpy(), wanted.numpy()) > 1e-3
    assert 0 < int((made.count > 1).sum()) < slots
