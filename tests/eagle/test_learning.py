"""A head that learns from finished texts: what it learns, who drafts, and that no token depends on it."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import pytest
import torch

from paceline import SpeculativeConfig, SpeculativeGenerator
from paceline.core.errors import CheckpointError, ConfigurationError, StorageError
from paceline.decoder.options import LoadOptions
from paceline.draft_checks import prepared
from paceline.eagle import checkpoint, learning
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.learning import FinishedText, Learning, current_head
from paceline.eagle.tree import Chain
from paceline.heads.frozen_model import FrozenTarget
from paceline.loadable import loadable
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import NEWER, config, random_head

PROMPTS = [[5, 17, 17, 90], [4], [33, 2, 9], list(range(20, 45))]
SAMPLED = {"do_sample": True, "temperature": 0.7, "seed": 11}


def save(folder: Path, workshop: Workshop, *, seed: int = 1, **changes: object) -> Path:
    """A random head for the tiny target; all ids are drafted."""
    made = config(workshop.decoder(slots=1).config, 3, draft_vocab_size=VOCABULARY, **changes)
    checkpoint.save(folder, random_head(made, seed=seed))
    return folder


def answers(workshop: Workshop, count: int, seed: int = 0) -> list[FinishedText]:
    """Texts that the tiny target wrote greedily."""
    prompts = torch.randint(3, VOCABULARY, (count, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    texts = workshop.decoder(slots=4).sample(prompts, max_new_tokens=16)
    return [FinishedText(3, [int(token) for token in row]) for row in texts]


@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("changes", [{}, NEWER])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_adopted_head_drafts_as_a_loaded_one(
    workshop: Workshop, tmp_path: Path, backend: str, changes: dict[str, object], quantization: str | None
) -> None:
    first, second = (save(tmp_path / str(seed), workshop, seed=seed, **changes) for seed in (1, 2))
    target = workshop.decoder(slots=4, backend=backend)
    made, loaded = (
        EagleDrafter.from_pretrained(folder, target, Chain(3), quantization=quantization) for folder in (first, second)
    )
    generator, other = SpeculativeGenerator(made, target), SpeculativeGenerator(loaded, target)
    for sampling in ({}, SAMPLED):
        generator.sample(PROMPTS, max_new_tokens=12, **sampling)  # graphs with the first head's weights are made
    made.adopt(second)
    for sampling in ({}, SAMPLED):
        tokens = generator.sample(PROMPTS, max_new_tokens=12, **sampling)
        assert tokens.equal(other.sample(PROMPTS, max_new_tokens=12, **sampling))
        counts = [one.statistics.num_accepted_tokens_per_pos for one in (generator, other)]
        assert counts[0] == counts[1]


def test_heads_exchanged_between_rounds_change_no_token(workshop: Workshop, tmp_path: Path) -> None:
    heads = [save(tmp_path / str(seed), workshop, seed=seed) for seed in (1, 2)]
    target = workshop.decoder(slots=4)
    for sampling in ({}, SAMPLED):
        drafter = EagleDrafter.from_pretrained(heads[0], target, Chain(3))
        generator, rows = SpeculativeGenerator(drafter, target), dict[int, list[int]]()
        for index, output in enumerate(generator.stream(PROMPTS, max_new_tokens=24, **sampling)):
            rows.setdefault(output.index, []).extend(output.tokens)
            if index % 3 == 0:
                drafter.adopt(heads[index % 2])
        plain = target.sample(PROMPTS, max_new_tokens=24, return_dict=True, **sampling)
        for index, prompt in enumerate(PROMPTS):
            assert [*prompt, *rows[index]] == plain.sequences[index, : plain.lengths[index]].tolist()


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"draft_vocab_size": VOCABULARY - 1}])
def test_another_kind_of_head_is_not_adopted(workshop: Workshop, tmp_path: Path, changes: dict[str, object]) -> None:
    drafter = EagleDrafter.from_pretrained(save(tmp_path / "a", workshop), workshop.decoder(slots=1), Chain(2))
    other = config(workshop.decoder(slots=1).config, 3, **{"draft_vocab_size": VOCABULARY, **changes})
    checkpoint.save(tmp_path / "b", random_head(other))
    with pytest.raises(CheckpointError, match="expected a head t"):
        drafter.adopt(tmp_path / "b")


def test_a_head_that_has_learnt_replaces_the_shipped_one_and_stays(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "_RATE", 3e-2)
    shipped, work = save(tmp_path / "shipped", workshop), tmp_path / "work"
    work.mkdir()
    found = Learning(workshop.checkpoint(), shipped, work, depth=2)
    texts = answers(workshop, 16)
    for text in texts * 20:  # a stream of few requests
        found.add(text)
    heads = []
    while not found.idle:
        heads += [head for head in [found.step()] if head is not None]
    progress = found.progress()
    assert progress.texts == 320 and heads, progress
    lengths = progress.acceptance_length
    assert lengths["live"] > lengths["shipped"] + 0.1
    assert current_head(work, shipped) == heads[-1]
    assert Learning(workshop.checkpoint(), shipped, work, depth=2).network.start != found.network.start

    target = workshop.decoder(slots=4)
    accepted = []
    for learn in (None, str(work)):
        generator = SpeculativeGenerator(str(shipped), target, k=2, learn=learn)
        rows = [text.tokens[:3] for text in texts]
        tokens = generator.sample(rows, max_new_tokens=16)
        assert tokens.equal(target.sample(rows, max_new_tokens=16))
        accepted.append(generator.statistics.num_accepted_tokens)
        if generator.learner is not None:
            assert generator.learner.heads == 1
            generator.learner.close()
    assert accepted[1] > accepted[0]

    save(shipped, workshop, seed=3)  # of another shipped head nothing is used
    assert current_head(work, shipped) is None


def test_a_live_head_that_is_worse_than_the_shipped_one_goes(workshop: Workshop, tmp_path: Path) -> None:
    shipped, work = save(tmp_path / "shipped", workshop), tmp_path / "work"
    work.mkdir()
    found = Learning(workshop.checkpoint(), shipped, work, depth=2)
    found._lengths, found._since, found._scored = {"shipped": 2.0, "live": 1.9, "learner": 1.9}, 24, 24
    assert found._decide() == shipped and found.progress().acceptance_length["live"] == 2.0
    found._lengths, found._since = {"shipped": 2.0, "live": 1.99, "learner": 2.0}, 24
    assert found._decide() is None


def test_answers_that_are_too_short_are_left_out(workshop: Workshop, tmp_path: Path) -> None:
    found = Learning(workshop.checkpoint(), save(tmp_path / "shipped", workshop), tmp_path, depth=2)
    found.add(FinishedText(3, [1, 2, 3, 4, 5]))
    assert found.idle and found.progress().texts == 0


@pytest.mark.parametrize("draft", ["ngram", "suffix", None])
def test_what_cannot_learn_is_refused(workshop: Workshop, tmp_path: Path, draft: str | None) -> None:
    with pytest.raises(ConfigurationError, match="learn: expected a"):
        SpeculativeGenerator(draft, workshop.decoder(slots=1), learn=str(tmp_path))
    with pytest.raises(StorageError, match="learn: /proc cannot be written"):
        SpeculativeGenerator(str(save(tmp_path / "head", workshop)), workshop.decoder(slots=1), learn="/proc")


def test_a_damaged_head_of_an_earlier_process_is_left_out(workshop: Workshop, tmp_path: Path) -> None:
    shipped, work = save(tmp_path / "shipped", workshop), tmp_path / "work"
    found = Learning(workshop.checkpoint(), shipped, work, depth=2)
    work.mkdir()
    found._lengths = {"learner": 1.0}
    head = found._publish()
    for file in head.iterdir():
        file.write_bytes(b"damaged")
    assert current_head(work, shipped) == head
    again = Learning(workshop.checkpoint(), shipped, work, depth=2)
    assert again.network.start == found.network.start
    again._lengths = {"learner": 1.0}
    assert again._publish() != head and current_head(work, shipped) != head


@pytest.mark.parametrize("kind", ["llama4", "gemma3n", "falcon new"])
def test_a_target_for_which_no_head_can_be_trained_is_refused(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    """To learn for it too, before a head is loaded."""
    with pytest.raises(CheckpointError, match="to train heads for, got"):
        FrozenTarget(workshop.checkpoint(kind=kind), (0, 1))
    config = SpeculativeConfig(draft=str(save(tmp_path / "shipped", workshop)), k=2, learn=str(tmp_path / "w"))
    assert prepared(config, loadable(workshop.checkpoint(), LoadOptions())).learn
    with pytest.raises(CheckpointError, match="to train heads for, got"):
        prepared(config, loadable(workshop.checkpoint(kind=kind), LoadOptions()))
    assert not (tmp_path / "w").exists()


@pytest.mark.full
def test_a_process_learns_and_may_die(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = workshop.decoder(slots=4)
    generator = SpeculativeGenerator(str(save(tmp_path / "shipped", workshop)), target, k=2, learn=str(tmp_path / "w"))
    learner = generator.learner
    assert learner is not None
    prompts = [text.tokens[:3] for text in answers(workshop, 16)]
    plain = target.sample(prompts, max_new_tokens=16)
    for _ in range(600):
        assert generator.sample(prompts, max_new_tokens=16).equal(plain)
        if learner.heads:
            break
        sleep(0.5)
    assert learner.heads and learner.progress.texts
    process = learner._process
    assert process is not None
    process.kill()
    process.wait()
    assert generator.sample(prompts, max_new_tokens=16).equal(plain)
    learner.close()
