"""State of a drafter between rounds, the probabilities that it states, and the trees that it cannot have.

That it changes no token: tests/equality and tests/contract.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree
from paceline.engine.adaptive import DraftLengthController
from tests.decoder.tiny import VOCABULARY, Workshop, fresh
from tests.eagle.heads import PARALLEL, drafter, features
from tests.fakes import misfit

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9], list(range(20, 45))]


def test_the_cache_equals_one_pass_while_draft_lengths_change(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft lengths of a list share a head and what it has not read yet: depth 0 for a while leaves no gap."""

    class Turns(DraftLengthController):
        def choose(self, deepest: int) -> int:
            self.turn = getattr(self, "turn", -1) + 1
            return (4, 0, 0, 1, 0, 4)[self.turn % 6]

    monkeypatch.setattr("paceline.build.DraftLengthController", Turns)
    target = workshop.decoder(slots=1)
    for version in (1, 3):
        made, other = (drafter(tmp_path, target, version, Chain(4)) for _ in range(2))
        generator = SpeculativeGenerator(made, target, k=(0, 1, 4))
        text = generator.sample(PROMPTS[:1], max_new_tokens=30)[0].tolist()
        assert set(generator.statistics.draft_lengths) == {0, 1, 4}
        other.add_request(0, text, features(target, text, other))
        read = len(text) - 8  # behind that, the last commits and drafts
        for ours, wanted in zip(made.head.caches()[0], other.head.caches()[0], strict=True):
            torch.testing.assert_close(ours[:, :, :read], wanted[:, :, :read], rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigurationError, match="got several; give one number, or let it draft a chain"):
        drafter(tmp_path, target, 3, StaticTree((-1, -1, 0))).shortened(1)


@pytest.mark.parametrize("version", [1, 3])
def test_draft_probs_of_a_sampled_chain_are_its_distribution(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Over the target's whole vocabulary, with nothing for ids that cannot be drafted; each slot as it samples."""
    slots, rounds, temperature = 4, 300, 1.3
    target = workshop.decoder(slots=slots)
    made = drafter(tmp_path, target, version, Chain(2, drawn=True))
    hidden = torch.randn(slots, 1, made.head.config.hidden_size, generator=torch.Generator().manual_seed(2))
    logits = made.head.scores(hidden)[:, 0]
    wanted = torch.zeros(slots, VOCABULARY)
    wanted[:, made.head.ids.long()] = (logits / temperature).softmax(-1)
    monkeypatch.setattr(made.head, "read", lambda *_, **__: hidden)
    ints = torch.ones(slots, 1, dtype=torch.int32)
    step, first = made.step(target.n_positions, "full"), []
    for number in range(rounds):
        seeds = [Sampling(temperature=temperature, seed=number * slots + slot) for slot in range(slots)]
        sampling = sampling_tensors(seeds)
        drafts, distribution = step(ints, ints[:, 0], 5 * ints[:, 0], sampling.params, sampling.seeds)
        first.append(drafts[:, 0])
        torch.testing.assert_close(distribution[:, 0], wanted, rtol=1e-3, atol=1e-6)
        assert (distribution.gather(2, drafts.long().unsqueeze(-1)) > 0).all()
    assert misfit(torch.stack(first)[:, :1].numpy(), wanted[0].double().numpy()) > 1e-3


def test_prefill_graphs_are_shared_by_every_growth(workshop: Workshop, tmp_path: Path) -> None:
    target = fresh(workshop.checkpoint())
    for draft_tree in (Chain(2), DynamicTree(8, depth=3, width=3)):
        drafter(tmp_path, target, 3, draft_tree).add_request(0, PROMPTS[0], torch.zeros(len(PROMPTS[0]), 96))
    keys = [graph.key for graph, _ in target.graphs()]
    assert keys == [keys[0]] * 2 and keys[0].kind == "read"
    assert target.graphs()[0][0].facts == target.graphs()[1][0].facts


def test_two_heads_of_one_shape_keep_their_graphs_apart(workshop: Workshop, tmp_path: Path) -> None:
    """A target keeps the graphs of its drafters; a second head must not get those of the first."""
    target = workshop.decoder(slots=1)
    first, second = (drafter(tmp_path, target, 3, Chain(3)) for _ in range(2))
    for name in ("held.fc", *(f"layers.0.{part}" for part in ("qkv", "out", "mlp_gate_up", "mlp_down"))):
        second.head.get_parameter(name).data.neg_()
    accepted = []
    for made in (first, second, first):
        generator = SpeculativeGenerator(made, target)
        generator.sample(PROMPTS[:1], max_new_tokens=20)
        accepted.append(made.head.caches()[0][0].clone())
    assert torch.equal(accepted[0], accepted[2]) and not torch.equal(accepted[0], accepted[1])


def test_a_tree_larger_than_the_cache_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    """DynamicTree(20, depth=18, width=10) keeps 20 nodes and expands 171; the cache has 128 rows after its text."""
    target = workshop.decoder(slots=1)
    room = target.options.rows - target.n_positions
    made = drafter(tmp_path, target, 3, DynamicTree(20, depth=1 + room // 10, width=10))
    assert made.draft_tree.rows <= room
    generator = SpeculativeGenerator(made, target)
    prompt = [index % VOCABULARY for index in range(target.n_positions - 4)]  # grows from the last positions
    tokens = generator.sample([prompt], max_new_tokens=4)
    assert torch.equal(tokens, target.sample([prompt], max_new_tokens=4))
    with pytest.raises(ConfigurationError, match="got 5"):
        EagleDrafter(made.head, target, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="at most 128 cache rows after the last position, got 171"):
        EagleDrafter(made.head, target, DynamicTree(20, depth=18, width=10))


def test_impossible_trees_are_rejected(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.decoder(slots=1)

    def peagle(draft_tree: DraftTree) -> EagleDrafter:
        return drafter(tmp_path, target, 3, draft_tree, **PARALLEL)

    for make, words in (
        (lambda: DynamicTree(3, depth=4, width=2), "4 to"),
        (lambda: DynamicTree(99, depth=2, width=3), "12 nodes"),
        (lambda: StaticTree((0, -1)), "parent"),
        (lambda: peagle(DynamicTree(8, depth=3, width=3)), "expected a chain or a static tree for a P-EAGLE head"),
        (lambda: peagle(Chain(65)), "expected at most 128 cache rows .* got 130 for a chain 65 w"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            make()
