"""Parts of draft_tree by themselves: what is kept of a tree, the choice among equals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import reduce
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.eagle.tree import Chain, best, kept
from tests.decoder.tiny import Workshop
from tests.eagle.heads import drafter


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_first_pick_of_a_tree_is_the_pick_of_a_chain(
    workshop: Workshop, tmp_path: Path, temperature: float
) -> None:
    head = drafter(tmp_path, workshop.decoder(slots=4), 3, Chain(2)).head
    sampling = sampling_tensors([Sampling(temperature=temperature, seed=seed) for seed in range(4)])
    positions = torch.tensor([[3], [70], [5], [90]], dtype=torch.int32)
    hidden = torch.randn(4, 1, head.config.hidden_size)
    logprob, picks = best(head, hidden, 3, sampling=sampling, positions=positions)
    chosen = head.kernels.sample_tokens(head.logits(hidden), positions, sampling)
    assert torch.equal(picks[..., 0], chosen)
    assert (logprob <= 0).all() and (logprob.diff(dim=-1) <= 1e-3).all() and (logprob.exp().sum(-1) <= 1.0001).all()


@given(st.lists(st.integers(-3, 0), min_size=4, max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_kept_nodes_are_connected_and_ordered_even_with_ties(steps: list[int], random: object) -> None:
    """A child has its parent's value plus a step that is never above 0; many are equal."""
    parents = [random.randrange(-1, node) if node else -1 for node in range(len(steps))]  # type: ignore[attr-defined]
    logprob: list[float] = []
    for parent, step in zip(parents, steps, strict=True):
        logprob.append((logprob[parent] if parent >= 0 else 0.0) + step)
    nodes = (len(steps) + 1) // 2
    tokens, above = kept(
        torch.arange(100, 100 + len(steps), dtype=torch.int32)[None],
        torch.tensor([logprob]),
        torch.tensor([parents], dtype=torch.int32),
        nodes=nodes,
    )
    ids = [token - 100 for token in tokens[0].tolist()]
    assert ids == sorted(sorted(range(len(steps)), key=lambda node: (-logprob[node], node))[:nodes])
    assert [ids[p] if p >= 0 else -1 for p in above[0].tolist()] == [parents[node] for node in ids]
    assert all(-1 <= parent < node for node, parent in enumerate(above[0].tolist()))


def test_top_k_ties_give_the_lowest_id_first() -> None:
    values, ids = reduce.top(torch.tensor([[1.0, 3.0, 3.0, -2.0, 3.0]]), 4)
    assert ids.tolist() == [[1, 2, 4, 0]] and values.tolist() == [[3.0, 3.0, 3.0, 1.0]]
