"""Proposals of trained heads, and the rules and trees that they can be used with.

That they change no token: tests/equality (random heads), and tests/heads/test_shipped.py (trained ones).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import MedusaDrafter, SpeculativeGenerator, Typical
from paceline.core.errors import ConfigurationError
from paceline.core.types import Commit, Proposal, RoundLimits, SamplingTensors
from paceline.heads.features import TrainingData
from paceline.heads.frozen_model import FrozenTarget
from paceline.medusa import train
from paceline.medusa.config import MedusaConfig, MedusaTexts, MedusaTraining
from paceline.medusa.tree import Choices
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.equality.settings import PROMPTS, plain, run, texts
from tests.fakes import Around


@pytest.fixture(scope="module")
def heads_folder(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tied heads of one block each, with a tree."""
    out, work = tmp_path_factory.mktemp("heads"), tmp_path_factory.mktemp("heads-work")
    target = FrozenTarget(workshop.checkpoint("target"))
    stream = np.random.default_rng(1).integers(0, VOCABULARY, 9000).astype(np.int32)
    plan = MedusaTexts(tokens=0, self_distill_tokens=128 * 40, length=40, prompt=4, eval_samples=4)
    states = train.gather(target, TrainingData(stream), plan, work=work, report=lambda *_: None)
    config = MedusaConfig(3, 1, 32, VOCABULARY, tied=True)
    torch.manual_seed(0)
    options = MedusaTraining(epochs=6, batch_size=8, learning_rate=5e-3)
    train.train(target, config, options, states=states, work=work, out=out, prompt=4, report=lambda *_: None)
    tree = Choices.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [3], [0, 0, 1]])
    tree.write(out / "tree.json")
    return out


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
    assert not result.statistics.lossless and result.statistics.to_dict()["acceptor"] == "typical"
    hot = {"do_sample": True, "temperature": 1.5, "seed": 3}
    loose = run(SpeculativeGenerator(drafter, target, acceptor=Typical(epsilon=0.01, alpha=0.1)), hot, new=60)
    exact = run(SpeculativeGenerator(drafter, target), hot, new=60)
    assert (exact.statistics.acceptor, exact.statistics.lossless) == ("match", True)
    assert texts(loose) != texts(exact)
    assert loose.statistics.acceptance_rate > exact.statistics.acceptance_rate
    with pytest.raises(ConfigurationError, match="on the device"):
        run(generator, {"repetition_penalty": 1.2})


def test_artefacts_depend_on_shape_and_tree_only(workshop: Workshop, heads_folder: Path) -> None:
    """Heads of one shape share them, whatever target they came with."""
    drafter = MedusaDrafter.from_pretrained(heads_folder, workshop.decoder())
    other = MedusaDrafter.from_pretrained(heads_folder, workshop.decoder(), draft_tree=[[0]])
    assert drafter.step_key(1) != other.step_key(1) and drafter.cache_key() != other.cache_key()
    drafter.heads.config = replace(drafter.heads.config, base="somewhere/else")
    alike = MedusaDrafter(drafter.heads, drafter.decoder, drafter.choices)
    assert alike.step_key(1) == drafter.step_key(1)
    assert not any(p.requires_grad for p in drafter.step(1, "full").parameters())


def test_mismatched_trees_and_targets_are_rejected(workshop: Workshop, heads_folder: Path) -> None:
    target = workshop.decoder()
    for draft_tree, said in (
        (Choices.chain(4), "a depth of at most 3"),
        ([[rank] for rank in range(VOCABULARY + 1)], r"rank|window"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            MedusaDrafter.from_pretrained(heads_folder, target, draft_tree=draft_tree)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="got 5"):  # before heads are read
        MedusaDrafter.from_pretrained(heads_folder / "none", target, draft_tree=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="drafter of trees"):
        run(SpeculativeGenerator(MedusaDrafter.from_pretrained(heads_folder, target), target, acceptor="reject"), {})
    drafter = MedusaDrafter.from_pretrained(heads_folder, target, draft_tree=Choices.chain(2))
    assert drafter.draft_shape.is_chain
    assert run(SpeculativeGenerator(drafter, target, acceptor="reject"), {}).statistics.num_accepted_tokens
