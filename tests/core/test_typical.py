"""`Typical` against a walk over all paths in plain Python, and that it is lossy where it is meant to be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import probs as distributions
from paceline.core import tree
from paceline.core.acceptance.base import committed
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Proposal
from tests.core.deciding import decide, matched
from tests.fakes import misfit

V = 5


def ints(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def longest(drafts: list[int], parents: tuple[int, ...], distribution: list[list[float]], rule: Typical) -> list[int]:
    """Rows of the best path, by looking at every path there is."""
    best: tuple[float, float, list[int]] = (0, 0.0, [])
    for node in range(len(parents)):
        way: list[int] = []
        up = node
        while up != tree.ROOT:
            way.insert(0, up)
            up = parents[up]
        likely = 0.0
        for one in way:
            p = distribution[parents[one] + 1]
            entropy = -sum(x * math.log(x + 1e-5) for x in p)
            if drafts[one] == PAD or p[drafts[one]] <= min(rule.epsilon, rule.alpha * math.exp(-entropy)):
                break
            likely += math.log(p[drafts[one]])
        else:
            if (len(way), likely) > (best[0], best[1] + 1e-6 if len(way) == best[0] else -math.inf):
                best = (len(way), likely, [one + 1 for one in way])
    return best[2]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...] | None, list[list[int]], Tensor]:
    size, slots = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    chain = draw(st.booleans())
    parents = None if chain else tuple(draw(st.integers(-1, node - 1)) for node in range(size))
    drafts = [draw(st.lists(st.integers(-1, V - 1), min_size=size, max_size=size)) for _ in range(slots)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    spread = draw(st.sampled_from([0.5, 2.0, 6.0]))
    distribution = torch.softmax(torch.randn(slots, size + 1, V, generator=generator) * spread, -1)
    return parents, drafts, distribution


@given(cases(), st.sampled_from([Typical(), Typical(0.3, 0.5), Typical(0.5, 0.9)]))
def test_the_longest_typical_path_is_accepted(
    case: tuple[tuple[int, ...] | None, list[list[int]], Tensor], rule: Typical
) -> None:
    parents, drafts, distribution = case
    nodes = len(drafts[0])
    line = parents if parents is not None else tree.chain(nodes)
    choices = torch.arange(len(drafts) * (nodes + 1), dtype=torch.int32).view(len(drafts), -1)
    verdict = decide(rule, Proposal(ints(*drafts), parents), probs=distribution, choices=choices)
    for slot, row in enumerate(drafts):
        expected = longest(row, line, distribution[slot].tolist(), rule)
        count = int(verdict.count[slot])
        found = verdict.path[slot].tolist()
        assert found[count:] == [PAD] * (len(found) - count)
        assert found[:count] == expected
        assert int(verdict.token[slot]) == int(choices[slot, expected[-1] if expected else 0])


def test_a_separate_tree_for_every_slot() -> None:
    distribution = torch.full((2, 3, V), 1 / V)
    parents = ints([-1, -1], [-1, 0])
    verdict = decide(
        Typical(), Proposal(ints([1, 2], [1, 2]), parents), probs=distribution, choices=ints([0, 1, 2], [0, 1, 2])
    )
    assert verdict.path.tolist() == [[1, PAD], [1, 2]]
    assert verdict.token.tolist() == [1, 2]


def test_a_flat_target_accepts_everything_and_a_peaked_one_its_argmax_only() -> None:
    drafts = ints([4, 3, 2, 1])
    choices = ints([0, 0, 0, 0, 0])
    flat = torch.full((1, 5, V), 1 / V)
    assert decide(Typical(), Proposal(drafts), probs=flat, choices=choices).count.tolist() == [4]
    sure = torch.zeros(1, 5, V)
    sure[..., 4] = 1.0
    verdict = decide(Typical(), Proposal(drafts), probs=sure, choices=choices)
    assert committed(Proposal(drafts), verdict).tolist() == [[4, 0, PAD, PAD, PAD]]


@given(cases())
def test_typical_acceptance_at_temperature_0_is_match(
    case: tuple[tuple[int, ...] | None, list[list[int]], Tensor],
) -> None:
    parents, drafts, distribution = case
    for row in drafts:  # children of one node with the same token would see one text, and one distribution
        met: set[tuple[int, int]] = set()
        for node, token in enumerate(row):
            parent = node - 1 if parents is None else parents[node]
            row[node] = PAD if (parent, token) in met else token
            met.add((parent, token))
    greedy = sampling_tensors([Sampling()] * len(drafts))
    one_hot = distributions.probabilities(distribution.log(), greedy)
    choices = one_hot.argmax(-1).to(torch.int32)
    proposal = Proposal(ints(*drafts), parents)
    ours, theirs = decide(Typical(), proposal, probs=one_hot, choices=choices), matched(proposal, choices)
    assert ours.count.tolist() == theirs.count.tolist()
    assert committed(proposal, ours).tolist() == committed(proposal, theirs).tolist()


@pytest.mark.parametrize(("rule", "exact"), [("match", True), ("typical", False)])
def test_typical_acceptance_changes_the_distribution(rule: str, exact: bool) -> None:
    """A target that draws evenly among four tokens, and a drafter that always says the first of them."""
    count = 4000
    sampling = sampling_tensors([Sampling(temperature=1.0, seed=seed) for seed in range(count)])
    logits = torch.zeros(count, 2, 4)
    positions = torch.tensor([[7, 8]], dtype=torch.int32).expand(count, 2)
    choices = distributions.sample_tokens(logits, positions, sampling)
    proposal = Proposal(torch.zeros(count, 1, dtype=torch.int32))
    verdict = (
        matched(proposal, choices)
        if rule == "match"
        else decide(Typical(), proposal, probs=distributions.probabilities(logits, sampling), choices=choices)
    )
    first = committed(proposal, verdict)[:, :1].numpy()
    p = misfit(first, torch.full((4,), 0.25).numpy())
    assert p > 1e-3 if exact else p < 1e-9


def test_thresholds_out_of_range_are_rejected() -> None:
    for wrong in ({"epsilon": 0.0}, {"epsilon": 1.0}, {"alpha": -0.1}, {"alpha": float("nan")}):
        with pytest.raises(ConfigurationError, match="between 0 and 1"):
            Typical(**wrong)
