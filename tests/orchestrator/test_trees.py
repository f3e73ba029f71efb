"""Drafters that propose trees: the text is that of plain decoding, and what the cache holds is one chain."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.core import tree
from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.engine.rounds import drafted_depths, drafted_last
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.fakes import Checked, TableDecoder, table

TREE = (-1, -1, 0, 0, 1, 2, 5, 4)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7], [9]]


class Orchard(Drafter):
    """Knows the texts and plants the right tokens on a random way down, junk or nothing elsewhere.

    ``grown``: every proposal brings parents of its own. Checks the features it is given: as many as tokens.
    """

    max_positions: int | None = None

    def __init__(self, texts: Sequence[Sequence[int]], *, grown: bool, reads: FeatureSpec | None = None) -> None:
        self.draft_shape = DraftShape(len(TREE), 4, dynamic=True) if grown else tree.draft_shape(TREE)
        self.reads, self._texts, self._dice = reads, [list(text) for text in texts], random.Random(0)
        self._read: dict[int, list[int]] = {}

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        assert (features is None) == (self.reads is None)
        assert features is None or len(features) == len(prompt)
        self._read[slot] = list(prompt)

    def finish_request(self, slot: int) -> None:
        self._read.pop(slot, None)

    def update(self, commit: Commit) -> None:
        assert (commit.features is None) == (self.reads is None)
        assert commit.features is None or commit.features.shape[:2] == commit.tokens.shape
        for slot, tokens in enumerate(commit.tokens.tolist()):
            if slot in self._read and int(commit.first_row[slot]) == len(self._read[slot]):
                self._read[slot] += tokens[: int(commit.count[slot])]

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        rows, trees = [], []
        for slot in range(len(commit.tokens)):
            parents = self._grow() if self.draft_shape.dynamic else TREE
            rows.append(self._plant(slot, parents))
            trees.append(parents)
        given = torch.tensor(trees, dtype=torch.int32) if self.draft_shape.dynamic else TREE
        return Proposal(torch.tensor(rows, dtype=torch.int32), given)

    def _grow(self) -> tuple[int, ...]:
        while True:
            parents = tuple(self._dice.randrange(-1, node) for node in range(len(TREE)))
            if max(tree.depths(parents)) <= 4:
                return parents

    def _plant(self, slot: int, parents: tuple[int, ...]) -> list[int]:
        read = self._read.get(slot, [])
        rest = next((text[len(read) :] for text in self._texts if read and text[: len(read)] == read), [])
        depths = tree.depths(parents)
        right = {tree.ROOT}  # a node of truth on every level, as long as one hangs on the level before
        row = []
        for node, parent in enumerate(parents):
            depth = depths[node]
            good = parent in right and depth <= len(rest) and self._dice.random() < 0.8
            if good and not any(n in right for n in range(node) if depths[n] == depth):
                right.add(node)
                row.append(rest[depth - 1])
            else:
                row.append(self._dice.choice([PAD, self._dice.randrange(VOCABULARY)]))
        return row


@pytest.mark.parametrize("grown", [False, True], ids=["static", "grown"])
def test_the_cache_is_the_committed_prefix_after_every_tree(grown: bool) -> None:
    target = TableDecoder(table(VOCABULARY, seed=3, spread=2.0), slots=4)
    plain = target.sample(PROMPTS, max_new_tokens=40, do_sample=True, seed=1)
    checked = Checked(Orchard(plain.tolist(), grown=grown), target)
    assert torch.equal(checked.sample(PROMPTS, max_new_tokens=40, do_sample=True, seed=1), plain)
    assert checked.statistics.tau > 1.5


def test_hidden_states_are_those_that_predicted_the_tokens(workshop: Workshop) -> None:
    """After rounds over trees, features equal those of one reading of the whole text."""
    from paceline.decoder.steps import prefill

    target = workshop.decoder(slots=1)
    text = target.sample([PROMPTS[0]], max_new_tokens=24)[0].tolist()
    seen: list[tuple[int, Tensor]] = []

    class Watching(Orchard):
        def update(self, commit: Commit) -> None:
            super().update(commit)
            assert commit.features is not None
            seen.append((int(commit.first_row), commit.features[0, : int(commit.count)].clone()))

    maker = SpeculativeGenerator(Watching([text], grown=False, reads=FeatureSpec((0, 1, 2))), target)
    assert maker.sample([PROMPTS[0]], max_new_tokens=24)[0].tolist() == text
    _, whole = prefill(target, 0, text, reads=FeatureSpec((0, 1, 2)))
    assert whole is not None and len(seen) > 3
    for start, features in seen:
        torch.testing.assert_close(features, whole[start - 1 : start - 1 + len(features)], rtol=1e-4, atol=1e-4)


def test_the_replaced_draft_of_a_chain_follows_the_accepted_ones() -> None:
    proposal = Proposal(torch.tensor([[5, 6, 7], [5, 6, PAD], [5, 6, 7]]))
    assert drafted_last(proposal, [[5, 9], [5, 6, 9], [9]]) == [[6], [], [5]]


def test_the_replaced_drafts_of_a_tree_are_the_children_of_the_path() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 5, 3]])
    parents = (-1, -1, 0, 0, -1, 4)
    for given in (parents, torch.tensor([parents])):
        proposal = Proposal(tokens, given)
        assert drafted_last(proposal, [[9]]) == [[5, 6, 5]]
        assert drafted_last(proposal, [[5, 9]]) == [[7, 8, 3]]
        assert drafted_last(proposal, [[6, 9]]) == [[]]


def test_lengths_of_chains_are_those_of_their_tokens() -> None:
    made = Proposal.chains([[5, -1, 7], [3], [], [1, 2, 3, 4]], (2, 4))
    assert made.lengths == drafted_depths(Proposal(made.tokens), [4] * 4) == [1, 1, 0, 4]
