"""Medusa drafts, the target decides: the tokens are those of plain decoding, in any tree, batch, setting and round."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import MedusaDrafter, SpeculativeGenerator, Typical
from paceline.core.errors import ConfigurationError
from paceline.core.protocols import TraceableDrafter
from paceline.core.types import Commit, Proposal, RoundLimits, SamplingTensors
from paceline.heads.frozen_model import FrozenTarget
from paceline.medusa.tree import Choices
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.equality.settings import PROMPTS, SETTINGS, assert_rolled_back, plain, run, texts
from tests.fakes import Around
from tests.medusa.trees import MC_SIM_7B_63

SHALLOW = [path for path in MC_SIM_7B_63 if len(path) <= 3]
TREES: dict[str, list[list[int]] | None] = {
    "own": None,
    "chain": [[0], [0, 0], [0, 0, 0]],
    "bush": [[rank] for rank in range(8)],
    "published": SHALLOW,
}


@pytest.mark.parametrize(("tree", "setting"), list(zip(TREES, [*SETTINGS, "cool"], strict=True)))
def test_medusa_changes_no_token(workshop: Workshop, heads_folder: Path, tree: str, setting: str) -> None:
    """With trained heads, so that paths of a tree are accepted too; random ones are in tests/contract."""
    target = workshop.decoder()
    drafter = MedusaDrafter.from_pretrained(heads_folder, target, draft_tree=TREES[tree])
    result = run(SpeculativeGenerator(drafter, target), SETTINGS[setting])
    assert texts(result) == plain(target, SETTINGS[setting])
    assert_rolled_back(result)


def test_an_invalid_tree_is_rejected_before_heads_are_read(workshop: Workshop, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got 5"):
        MedusaDrafter.from_pretrained(tmp_path / "none", workshop.decoder(), draft_tree=5)  # type: ignore[arg-type]


class Recorder(Around):
    """A drafter around a drafter, outside the target's graph, that records what is proposed after which text."""

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        made = self.inner.propose(commit, sampling, bounds)
        self.seen.append((int(commit.first_row[0] + commit.count[0]), made.tokens[0].tolist()))
        return made


def test_proposals_are_the_heads_top_tokens_at_the_last_committed_state(workshop: Workshop, heads_folder: Path) -> None:
    """Against the heads on states of transformers' forward over the finished text."""
    target = workshop.decoder(slots=1)
    inner = MedusaDrafter.from_pretrained(heads_folder, target)
    recorder = Recorder(inner)
    recorder.seen = list[tuple[int, list[int]]]()
    text = texts(run(SpeculativeGenerator(recorder, target), {}, prompts=PROMPTS[:1], new=40))[0]
    states = FrozenTarget(workshop.checkpoint("target")).states(torch.tensor([text]))[0]
    assert len(recorder.seen) > 5
    for length, tokens in recorder.seen:
        # The last of `length` committed tokens is not read yet: it was predicted by the state before it.
        logits = inner.heads(states[length - 2 : length - 1], torch.nn.functional.linear)[0]
        best = logits.argsort(-1, descending=True)
        assert tokens == [int(best[len(path) - 1, path[-1]]) for path in inner.choices.paths]


def test_a_sampled_round_ranks_with_the_target_s_noise(workshop: Workshop, heads_folder: Path) -> None:
    """Coupled: over many seeds more is accepted than if only the heads' best tokens were proposed."""
    target = workshop.decoder()

    class Blind(MedusaDrafter):
        def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
            return super().propose(commit, SamplingTensors(torch.zeros_like(sampling.params), sampling.seeds), bounds)

    taken = []
    for kind in (MedusaDrafter, Blind):
        drafter = kind.from_pretrained(heads_folder, target, draft_tree=[[0], [0, 0]])
        setting = {"do_sample": True, "temperature": 2.0, "seed": 5}
        taken.append(
            run(SpeculativeGenerator(drafter, target, fused=False), setting, new=90).statistics.acceptance_rate
        )
    assert taken[0] > taken[1]


def test_typical_acceptance_is_greedy_at_0_and_labelled_lossy(
    workshop: Workshop, heads_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = workshop.decoder()
    drafter = MedusaDrafter.from_pretrained(heads_folder, target)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        generator = SpeculativeGenerator(drafter, target, acceptor="typical")
    assert "lossy" in caplog.text
    result = run(generator, {})
    assert texts(result) == plain(target, {})
    assert not result.statistics.lossless
    assert result.statistics.to_dict()["acceptor"] == "typical"
    exact = run(SpeculativeGenerator(drafter, target), SETTINGS["cool"]).statistics
    assert (exact.acceptor, exact.lossless) == ("match", True)
    hot = {"do_sample": True, "temperature": 1.5, "seed": 3}
    loose = SpeculativeGenerator(drafter, target, acceptor=Typical(epsilon=0.01, alpha=0.1))
    found = run(loose, hot, new=60)
    assert texts(found) != plain(target, hot, new=60)
    assert (
        found.statistics.acceptance_rate
        > run(SpeculativeGenerator(drafter, target), hot, new=60).statistics.acceptance_rate
    )
    with pytest.raises(ConfigurationError, match="on the device"):
        run(generator, {"repetition_penalty": 1.2})


def test_the_medusa_drafter_can_be_fused(workshop: Workshop, heads_folder: Path) -> None:
    drafter = MedusaDrafter.from_pretrained(heads_folder, workshop.decoder())
    assert isinstance(drafter, TraceableDrafter)
    other = MedusaDrafter.from_pretrained(heads_folder, workshop.decoder(), draft_tree=[[0]])
    assert drafter.step_key(1) != other.step_key(1)
    assert drafter.cache_key() != other.cache_key()
    drafter.heads.config = replace(drafter.heads.config, base="somewhere/else")
    alike = MedusaDrafter(drafter.heads, drafter.decoder, drafter.choices)
    assert alike.step_key(1) == drafter.step_key(1), (
        "heads of one shape share artefacts, whatever target they came with"
    )
    assert not any(p.requires_grad for p in drafter.step(1, "full").parameters())


def test_mismatched_trees_and_targets_are_rejected(workshop: Workshop, heads_folder: Path) -> None:
    target = workshop.decoder()
    with pytest.raises(ConfigurationError, match="a depth of at most 3"):
        MedusaDrafter.from_pretrained(heads_folder, target, draft_tree=MC_SIM_7B_63)
    with pytest.raises(ConfigurationError, match=r"rank|window"):
        MedusaDrafter.from_pretrained(heads_folder, target, draft_tree=[[rank] for rank in range(VOCABULARY + 1)])
    with pytest.raises(ConfigurationError, match="drafter of trees"):
        run(SpeculativeGenerator(MedusaDrafter.from_pretrained(heads_folder, target), target, acceptor="reject"), {})
    drafter = MedusaDrafter.from_pretrained(heads_folder, target, draft_tree=Choices.chain(2))
    assert drafter.draft_shape.is_chain
    assert run(SpeculativeGenerator(drafter, target, acceptor="reject"), {}).statistics.num_accepted_tokens
