"""Training on a small target: it learns, an interrupted run comes to the same end, and ranks are counted right."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.heads.features import TrainingData, cut, read_features
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.medusa import checkpoint, search, train
from paceline.medusa.config import MedusaConfig, MedusaTexts, MedusaTraining
from paceline.medusa.network import fresh
from paceline.medusa.train import MedusaTrainer
from tests.decoder.tiny import VOCABULARY, Workshop

CONFIG = MedusaConfig(heads=2, layers=1, hidden_size=32, vocab_size=VOCABULARY, tied=True)
PLAN = MedusaTexts(tokens=16 * 24, self_distill_tokens=16 * 24, length=24, prompt=6, eval_samples=4)


def quiet(*_: object) -> None:
    """Nothing is shown."""


@pytest.fixture(scope="module")
def target(workshop: Workshop) -> FrozenTarget:
    return FrozenTarget(workshop.checkpoint("target"))


def stream(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, 2000).astype(np.int32)


@pytest.fixture(scope="module")
def states(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept states of the target."""
    return train.gather(target, TrainingData(stream()), PLAN, work=tmp_path_factory.mktemp("work"), report=quiet)


def trained(
    target: FrozenTarget, states: Path, folder: Path, options: MedusaTraining, config: MedusaConfig = CONFIG
) -> MedusaTrainer:
    folder.mkdir(exist_ok=True)
    heads, windows = fresh(config, target.output), read_features(states / "train")
    return MedusaTrainer(heads, windows, options, output=target.output, folder=folder, data=states.name)


def losses(folder: Path) -> list[list[float]]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_training_states_predict_the_next_token(target: FrozenTarget, states: Path) -> None:
    """In greedy text the output layer puts the next token first at every place after the prompt."""
    kept = read_features(states / "measure")
    assert sum(map(len, kept)) == PLAN.eval_samples
    for part in kept:
        choices = (part.last.float() @ target.output.T).argmax(-1)
        agreed = choices[:, PLAN.prompt - 1 : -1] == part.tokens[:, PLAN.prompt :]
        assert float(agreed.float().mean()) > 0.95  # kept in bfloat16, which flips a near-tie now and then


def test_gathering_again_computes_nothing(target: FrozenTarget, states: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_all: object, **_named: object) -> Tensor:
        raise AssertionError("the target was run")

    monkeypatch.setattr(target, "read", refuse)
    monkeypatch.setattr(target, "continued", refuse)
    assert train.gather(target, TrainingData(stream()), PLAN, work=states.parent, report=quiet) == states


@pytest.mark.parametrize("loss_target", ["target", "text"])
@pytest.mark.parametrize("tied", [True, False])
def test_training_lowers_the_loss_and_keeps_the_target_unchanged(
    target: FrozenTarget, states: Path, tmp_path: Path, tied: bool, loss_target: str
) -> None:
    before = target.output.detach().clone()
    precision = "bf16" if tied else "f32"
    options = MedusaTraining(epochs=10, batch_size=4, learning_rate=3e-3, loss_target=loss_target, precision=precision)
    trainer = trained(target, states, tmp_path, options, replace(CONFIG, tied=tied))
    assert trainer.run(quiet)
    first, last = losses(tmp_path)[0], losses(tmp_path)[-1]
    assert all(b < a - 0.1 for a, b in zip(first, last, strict=True))
    assert torch.equal(target.output, before)


@pytest.mark.parametrize("loss_target", ["target", "text"])
def test_losses_over_frequent_ids(target: FrozenTarget, states: Path, tmp_path: Path, loss_target: str) -> None:
    options = MedusaTraining(batch_size=4, loss_target=loss_target)
    every = replace(options, loss_vocab_size=VOCABULARY)
    heads = [trained(target, states, tmp_path / str(i), one) for i, one in enumerate([options, every])]
    batch = next(iter(heads[0].batches()))
    assert heads[0].backward(batch) == heads[1].backward(batch)
    few = trained(target, states, tmp_path / "few", replace(options, loss_vocab_size=8))
    assert few.backward(batch)[0] < heads[0].backward(batch)[0]  # of 8 ids instead of all

    # By hand: the first head, whose blocks do nothing yet.
    tokens, hidden, counts = batch.tokens, batch.last.float(), torch.zeros(VOCABULARY, dtype=torch.int64)
    for part in read_features(states / "train"):
        counts += part.tokens.flatten().bincount(minlength=VOCABULARY)
    ids = counts.argsort(descending=True, stable=True)[:8].sort().values
    logits = (hidden @ target.output.T)[..., ids]
    seen = torch.isin(tokens[:, 2:], ids)
    labels = logits[:, 1:-1].softmax(-1)[seen]
    if loss_target == "text":
        labels = (tokens[:, 2:][seen].unsqueeze(-1) == ids).float()
    expected = -(labels * logits[:, :-2][seen].log_softmax(-1)).sum(-1).mean()
    again = trained(target, states, tmp_path / "again", replace(options, loss_vocab_size=8))
    assert again.backward(batch)[0] == pytest.approx(float(expected), rel=1e-4)

    with pytest.raises(ConfigurationError, match="tie the heads"):
        trained(target, states, tmp_path / "own", replace(options, loss_vocab_size=8), replace(CONFIG, tied=False))


def test_a_resumed_run_ends_in_the_same_weights(target: FrozenTarget, states: Path, tmp_path: Path) -> None:
    ends = []
    for name, minutes in (("whole", None), ("stopped", 0.0)):  # 0: one step and no more
        done, options = False, MedusaTraining(epochs=2, batch_size=4, max_minutes=minutes)
        while not done:
            run = trained(target, states, tmp_path / name, options)
            done = run.run(quiet)
        ends.append(run.heads.own().values())
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_run_with_other_options_or_data_is_not_resumed(target: FrozenTarget, states: Path, tmp_path: Path) -> None:
    other = train.gather(target, TrainingData(stream(1)), PLAN, work=states.parent, report=quiet)
    assert not torch.equal(*(read_features(folder / "train")[0].tokens for folder in (states, other)))
    options = MedusaTraining(epochs=0.1)
    trained(target, states, tmp_path, options).run(quiet)
    for data, changed, config, said in (
        (states, replace(options, learning_rate=1e-2), CONFIG, "a run with learning_rate 0.001, got 0.01"),
        (states, options, replace(CONFIG, heads=3), "a run with heads 2, got 3"),
        (other, options, CONFIG, r"a run with data states-.*, got states-"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            trained(target, data, tmp_path, changed, config)


def test_a_diverging_run_gives_no_result(target: FrozenTarget, states: Path, tmp_path: Path) -> None:
    """Heads of NaN were written, and counted as right everywhere."""
    options = MedusaTraining(epochs=4, batch_size=2, learning_rate=1e36)
    with pytest.raises(ConfigurationError, match="has diverged"):
        train.train(
            target, CONFIG, options, states=states, work=tmp_path, out=tmp_path, prompt=PLAN.prompt, report=quiet
        )
    assert not (tmp_path / "model.safetensors").exists()
    heads = fresh(CONFIG, target.output)
    with torch.no_grad():
        for parameter in heads.own().values():
            parameter.fill_(torch.nan)
    found = search.measure(heads, read_features(states / "measure", prompt=PLAN.prompt), target.output.detach())
    assert found.top() == [[0.0] * search.TOP] * 2


def test_token_ranks_are_counted_by_position(target: FrozenTarget, states: Path) -> None:
    """Against one place at a time, in plain Python."""
    torch.manual_seed(3)
    heads = fresh(CONFIG, target.output)
    with torch.no_grad():
        for parameter in heads.own().values():
            parameter.normal_(std=0.3)
    part = read_features(states / "measure", prompt=PLAN.prompt)[0]
    expected = []
    for tokens, states in zip(part.tokens, part.last.float(), strict=True):
        choices = (states @ target.output.T).argmax(-1).tolist()
        for t in range(PLAN.prompt - 1, len(tokens) - 3):
            if any(choices[t + i] != int(tokens[t + i + 1]) for i in range(2)):
                continue
            logits = heads(states[t : t + 1], torch.nn.functional.linear)[0]
            order = logits.argsort(-1, descending=True).tolist()
            expected.append([min(order[i].index(choices[t + i + 1]), search.TOP) for i in range(2)])
    found = search.measure(heads, [part], target.output.detach())
    assert found.ranks.tolist() == expected
    top = found.top()
    assert top[0][0] == pytest.approx(sum(row[0] == 0 for row in expected) / len(expected))
    assert all(a <= b for row in top for a, b in pairwise(row))


def test_tokens_are_trained_into_a_folder_of_heads(target: FrozenTarget, states: Path, tmp_path: Path) -> None:
    options = MedusaTraining(epochs=4, batch_size=4, learning_rate=3e-3)
    found = train.train(
        target, CONFIG, options, states=states, work=tmp_path, out=tmp_path, prompt=PLAN.prompt, report=quiet
    )
    assert found is not None
    table = json.loads((tmp_path / "accuracy.json").read_text())
    assert table["places"] == found.places > 0
    again = checkpoint.heads(tmp_path, target.output, torch.float32)
    measured = search.measure(again, read_features(states / "measure", prompt=PLAN.prompt), target.output.detach())
    assert measured.top()[0][9] == pytest.approx(found.top()[0][9], abs=0.05)  # bfloat16 on the way


def test_invalid_training_options_are_rejected(workshop: Workshop, target: FrozenTarget, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    for wrong in (
        {"loss_target": "soft"}, {"precision": "f16"}, {"epochs": 0}, {"epochs": nan}, {"epochs": inf},
        {"batch_size": 0}, {"learning_rate": 0.0}, {"learning_rate": nan}, {"learning_rate": inf},
        {"max_minutes": -1.0}, {"max_minutes": nan}, {"loss_vocab_size": -1},
    ):  # fmt: skip
        with pytest.raises(ConfigurationError):
            MedusaTraining(**wrong)  # type: ignore[arg-type]
    for plan in (
        {"tokens": 0}, {"length": 64, "prompt": 64}, {"eval_samples": 0}, {"temperature": ()},
        {"temperature": (0.5, -1.0)}, {"temperature": (nan,)},
    ):  # fmt: skip
        with pytest.raises(ConfigurationError):
            MedusaTexts(**plan)  # type: ignore[arg-type]
    sizes = ModelConfig.from_pretrained(workshop.checkpoint("target"))
    PLAN.check_room(sizes.max_position_embeddings, CONFIG.heads)
    for texts, heads in ((replace(PLAN, length=200), 2), (PLAN, 18)):
        with pytest.raises(ConfigurationError, match="length: expected at most"):
            texts.check_room(sizes.max_position_embeddings, heads)
    with pytest.raises(ConfigurationError, match="give more"):
        cut(np.zeros(100, dtype=np.int32), 5, 24, seed=0)
    states = torch.zeros(1, 3, 32)
    short = [Texts(torch.zeros(1, 3, dtype=torch.int64), states, states)]
    with pytest.raises(ConfigurationError, match="length: expected sequences of at least 4 tokens for 2 heads, got 3"):
        MedusaTrainer(
            fresh(CONFIG, target.output), short, MedusaTraining(), output=target.output, folder=tmp_path, data="short"
        )
    with pytest.raises(ConfigurationError, match="data: expected at least one sequence long enough to"):
        search.measure(fresh(CONFIG, target.output), short, target.output)
    with pytest.raises(CheckpointError, match="expected a checkpoint that transformers can load, got an"):
        FrozenTarget(tmp_path)
