"""Training of heads: it learns, continues where it stopped, and is bounded on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline import SpeculativeGenerator
from paceline.core.errors import CheckpointError, ConfigurationError
from paceline.core.types import FeatureSpec
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.steps import prefill
from paceline.eagle import train
from paceline.eagle.config import EagleHeadOptions, EagleTraining
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.network import TrainableHead
from paceline.eagle.train import acceptance, objective
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import FeatureCache
from paceline.heads.frozen_model import FrozenTarget
from paceline.heads.trainer import optimizers
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import NEWER, PARALLEL
from tests.eagle.lessons import LAYERS, SHORT, output, parts, stream, trained, trainer


def test_training_states_equal_a_decoders(workshop: Workshop) -> None:
    target = workshop.decoder(slots=1)
    text = list(range(3, 19))
    found = FrozenTarget(workshop.checkpoint(), LAYERS).read(torch.tensor([text]))
    _, last = prefill(target, 0, text, reads=FeatureSpec())
    _, streams = prefill(target, 0, text, reads=FeatureSpec(LAYERS))
    torch.testing.assert_close(found.last[0].float(), last, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.streams[0].float(), streams, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "mps"])
def test_a_missing_device_is_rejected(device: str) -> None:
    with pytest.raises(ConfigurationError, match=device):
        EagleTraining(tokens=1, device=device)


@pytest.mark.parametrize(
    ("version", "passes", "changes", "options"),
    [
        (1, 1, {}, {}),
        (3, 3, {}, {}),
        (1, 1, {}, {"precision": "bf16"}),
        (3, 3, {}, {"precision": "bf16"}),
        (3, 3, NEWER, {"loss": "lk_hybrid"}),
        (3, 3, PARALLEL, {"loss": "nla"}),
    ],
)
def test_training_raises_acceptance(
    workshop: Workshop,
    tmp_path: Path,
    version: int,
    passes: int,
    changes: dict[str, object],
    options: dict[str, Any],
) -> None:
    frozen, corpus, network, vocabulary = parts(workshop, tmp_path, version, **changes)
    given = {"tokens": 24 * 64 * 6, "ttt_steps": passes, "batch_size": 8, "ce_weight": 1.0, "learning_rate": 3e-3}
    options = EagleTraining(**given, **options)
    texts = corpus.batch(1)
    before = float(objective(network, texts, options, head=output(frozen), vocabulary=vocabulary).detach())
    measured = corpus.eval_texts()

    def measure(trained: TrainableHead) -> list[float]:
        return acceptance(trained, measured, depth=3, head=output(frozen), vocabulary=vocabulary, skip=SHORT.prompt)

    run = trainer((frozen, corpus, network, vocabulary), options, tmp_path, measure=measure)
    assert run.run(lambda *_: None)
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged[-1]["step"] == logged[-1]["of"] == run.steps and logged[-1]["loss"] < logged[0]["loss"]
    after = float(objective(network, texts, options, head=output(frozen), vocabulary=vocabulary).detach())
    assert after < 0.9 * before
    assert {p.dtype for p in network.parameters()} == {torch.float32}, "only products are of another precision"
    shares = measure(network)
    assert len(shares) == 3 and shares == sorted(shares, reverse=True)
    assert logged[-1]["greedy chains"] == [round(share, 4) for share in shares], "how it grew is in the log"


def test_a_resumed_run_equals_an_uninterrupted_one(workshop: Workshop, tmp_path: Path) -> None:
    ends = []
    for name, minutes in (("whole", None), ("stopped", 0.0)):  # 0: one step and no more
        done, runs = False, 0
        while not done:
            options = EagleTraining(tokens=24 * 8 * 6, ttt_steps=2, batch_size=8, max_minutes=minutes)
            run = trainer(parts(workshop, tmp_path / name, 3), options, tmp_path / name)
            done, runs = run.run(lambda *_: None), runs + 1
        assert runs == (1 if minutes is None else 6)
        ends.append((run.step, run.network.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], value) for name, value in ends[1][1].items())


def test_resuming_with_other_options_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    frozen, corpus, network, vocabulary = made = parts(workshop, tmp_path, 3)
    options = EagleTraining(tokens=24 * 8, ttt_steps=1, batch_size=8)
    trainer(made, options, tmp_path).run(lambda *_: None)
    other = FeatureCache(frozen, (stream() + 1) % VOCABULARY, SHORT, folder=tmp_path / "states")
    fewer = DraftVocab(vocabulary.ids.flip(0), VOCABULARY)
    for part, changed, texts, drafted in (
        (
            "expected a run with learning_rate 0.002, got 1e-05",
            replace(options, learning_rate=1e-5),
            corpus,
            vocabulary,
        ),
        ("expected a run with corpus", options, other, vocabulary),
        ("expected a run with drafted ids", options, corpus, fewer),
    ):
        with pytest.raises(ConfigurationError, match=part):
            trainer((frozen, texts, network, drafted), changed, tmp_path)
    trainer(made, options, tmp_path)


def test_an_interrupted_run_resumes(workshop: Workshop, tmp_path: Path) -> None:
    """Between two steps the last one is kept; in the middle of a change nothing is."""
    made, options = parts(workshop, tmp_path, 3), EagleTraining(tokens=24 * 8 * 3, ttt_steps=1, batch_size=8)

    def stop(*_all: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(made, options, tmp_path).run(stop)
    run = trainer(made, options, tmp_path)
    assert run.step == 1
    run._optimizers[1].step = stop  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        run.run(lambda *_: None)
    state = torch.load(tmp_path / "state.pt", weights_only=True)["state"]
    assert state["step"] == 1
    assert not all(torch.equal(state["weights"][name], x) for name, x in run.network.state_dict().items())


def test_evaluation_texts_are_not_trained_on(workshop: Workshop, tmp_path: Path) -> None:
    """All of 96 texts were within reach of training, and half of the evaluation texts were among them."""
    frozen = FrozenTarget(workshop.checkpoint(), LAYERS)
    texts = np.arange(96)[:, None] * np.ones(24, dtype=int)  # text i is i, over and over: as many as there are ids
    corpus = FeatureCache(frozen, texts.flatten(), replace(SHORT, eval_samples=32), folder=tmp_path)
    trained = {int(row[0]) for number in range(corpus.batches) for row in corpus.batch(number).tokens}
    measured = {int(row[0]) for row in corpus.eval_texts().tokens}
    assert (len(trained), len(measured)) == (64, 32) and not trained & measured
    with pytest.raises(ConfigurationError, match="give more"):
        FeatureCache(frozen, texts.flatten(), replace(SHORT, eval_samples=33), folder=tmp_path)
    with pytest.raises(ConfigurationError, match="change it, since the remaining sequences would be left out"):
        EagleTraining(tokens=100, batch_size=48)


def test_options_the_target_cannot_have_are_rejected_before_it_runs(workshop: Workshop) -> None:
    """Streams beyond its layers made heads that it refused itself; 0 ids meant all of them."""
    sizes = ModelConfig.from_pretrained(workshop.checkpoint())
    train.check(EagleHeadOptions(version=3, layers=LAYERS, draft_vocab_size=60), SHORT, sizes)
    for plan, said in (
        (EagleHeadOptions(version=3, layers=(0, 9)), r"streams from 0 to 2 of this target, got \[0, 9\]"),
        (EagleHeadOptions(version=3, layers=(-1,)), r"streams from 0 to 2 of this target, got \[-1\]"),
        (EagleHeadOptions(version=3, draft_vocab_size=0), "expected 1 to 96 for .*, got 0 for version 3"),
        (EagleHeadOptions(version=3, draft_vocab_size=97), "expected 1 to 96 for .*, got 97 for version 3"),
        (EagleHeadOptions(version=1, draft_vocab_size=60), "for version 1; correct it"),
        (EagleHeadOptions(depth=20), "20 draft positions"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            train.check(plan, SHORT, sizes)
    with pytest.raises(ConfigurationError, match=r"length: expected at most 128 tokens \(what the target reads\)"):
        train.check(EagleHeadOptions(), replace(SHORT, length=129), sizes)
    with pytest.raises(CheckpointError, match="EAGLE-2"):
        train.check(EagleHeadOptions(version=2), SHORT, sizes)
    nan = float("nan")
    for wrong in (
        {"learning_rate": nan},
        {"learning_rate": float("inf")},
        {"feature_weight": nan},
        {"ce_weight": -1.0},
        {"max_minutes": nan},
        {"precision": "f16"},
    ):
        with pytest.raises(ConfigurationError):
            EagleTraining(tokens=1, **wrong)  # type: ignore[arg-type]


def test_a_diverging_run_writes_no_result(workshop: Workshop, tmp_path: Path) -> None:
    run = trainer(parts(workshop, tmp_path, 3), EagleTraining(tokens=24 * 8, ttt_steps=1, batch_size=8), tmp_path)
    run.network.fc.weight.data.fill_(torch.nan)
    with pytest.raises(ConfigurationError, match="diverged: the loss of step 0 is nan"):
        run.run(lambda *_: None)


def test_states_are_kept_up_to_the_bound_and_equal_either_way(workshop: Workshop, tmp_path: Path) -> None:
    frozen = FrozenTarget(workshop.checkpoint(), LAYERS)
    one = FeatureCache(frozen, stream(), SHORT, folder=tmp_path / "kept")
    none = FeatureCache(frozen, stream(), replace(SHORT, feature_cache_gb=0), folder=tmp_path / "none")
    for corpus in (one, none):
        corpus.batch(0)
    assert len(list((tmp_path / "kept").rglob("*.safetensors"))) == 1
    assert not list((tmp_path / "none").rglob("*.safetensors"))
    ours, theirs = one.batch(0), none.batch(0)
    assert torch.equal(ours.streams, theirs.streams) and torch.equal(ours.last, theirs.last)
    with pytest.raises(ConfigurationError, match="give more"):
        FeatureCache(frozen, stream(10), SHORT, folder=tmp_path)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_updates_of_matrices_are_orthogonal_and_sized_like_those_of_adamw(shape: tuple[int, int]) -> None:
    """A step of Muon by its formulas, in double precision: momentum 0.95 (Nesterov), five quintic iterations, 0.2 times
    the root of the longer side, weight decay 0.01.
    """
    torch.manual_seed(0)
    matrix, gradients = torch.randn(shape), torch.randn(2, *shape)
    network, rate = torch.nn.Linear(shape[1], shape[0]), 0.1
    parameter, optimizer = network.weight, optimizers(network, rate)[0]
    parameter.data = matrix.clone()
    expected, momentum = matrix.double(), torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        update = 0.05 * gradient.double() + 0.95 * momentum
        update = update / update.norm()
        for _ in range(5):
            gram = update @ update.T
            update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
        values = torch.linalg.svdvals(update)
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
        expected = expected * (1 - rate * 0.01) - rate * 0.2 * max(shape) ** 0.5 * update
    moved = (expected - matrix).abs().max()
    assert float((parameter.detach().double() - expected).abs().max()) < 0.05 * float(moved), "products are in bfloat16"


def test_a_trained_head_is_written_and_drafts(workshop: Workshop, tmp_path: Path) -> None:
    asked = EagleHeadOptions(version=3, layers=LAYERS, draft_vocab_size=60, depth=2)
    folder = trained(workshop, tmp_path / "head", asked, stream())
    assert (folder / train.MEASURED).is_file()
    head = EagleDrafter.from_pretrained(folder, workshop.decoder(slots=1)).head
    assert head.config.draft_vocab_size == 60 and head.config.layers == LAYERS


def test_a_p_eagle_head_is_trained_written_and_drafts(workshop: Workshop, tmp_path: Path) -> None:
    """With every part that the options name; the id of unknown tokens is one that the data does not have."""
    rare = stream()[stream() != 7]
    asked = EagleHeadOptions(layers=LAYERS, depth=2, num_layers=2, qk_norm=True, fc_norm=True, peagle=True)
    trained(workshop, tmp_path / "head", asked, rare)
    target = workshop.decoder(slots=1)
    made = EagleDrafter.from_pretrained(tmp_path / "head", target)
    found = made.head.config
    assert (found.num_layers, found.qk_norm, found.fc_norm, found.mask_token) == (2, True, True, 7)
    ours = SpeculativeGenerator(made, target).sample([[5, 17]], max_new_tokens=12)
    assert torch.equal(ours, target.sample([[5, 17]], max_new_tokens=12))
    sizes = ModelConfig.from_pretrained(workshop.checkpoint())
    for wrong, said in (
        (replace(asked, version=1), "qk_norm: expected a head of version 3, got version 1"),
        (replace(asked, num_layers=0), "at least one layer, and an id below 96 for a P-EAGLE head only, got 0"),
        (replace(asked, mask_token=96), "got 2 and 96"),
        (EagleHeadOptions(layers=LAYERS, depth=2, mask_token=5), "got 1 and 5"),
        (EagleHeadOptions(depth=2, fc_norm=True, start=tmp_path / "head"), "its other parts, got fc_norm; omit"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            train.check(wrong, SHORT, sizes)
    with pytest.raises(ConfigurationError, match="loss: expected one of ce, lk_hybrid, nla, got 'kl'"):
        EagleTraining(tokens=1, loss="kl")


def test_a_trained_head_continues_training(workshop: Workshop, tmp_path: Path) -> None:
    """Its layers, its ids and what it has learned stay: steps of no size leave its weights as they were."""

    def run(name: str, head: EagleHeadOptions, rate: float) -> dict[str, torch.Tensor]:
        trained(workshop, tmp_path / name, head, stream(), tokens=24 * 8 * 3, learning_rate=rate)
        return load_file(tmp_path / name / "model.safetensors")

    own = EagleHeadOptions(layers=LAYERS, draft_vocab_size=60, depth=2)
    first, fresh = run("first", own, 1e-2), run("fresh", own, 1e-12)
    more = run("more", EagleHeadOptions(depth=2, start=tmp_path / "first"), 1e-12)
    assert all(torch.equal(more[name], first[name]) for name in first)
    assert not torch.equal(fresh["fc.weight"], first["fc.weight"])
    head = EagleDrafter.from_pretrained(tmp_path / "more", workshop.decoder(slots=1)).head
    assert head.config.draft_vocab_size == 60 and head.config.layers == LAYERS
    sizes = ModelConfig.from_pretrained(workshop.checkpoint())
    with pytest.raises(ConfigurationError, match="start: expected the layers and draft vocabulary of that"):
        train.check(EagleHeadOptions(layers=LAYERS, start=tmp_path / "first"), SHORT, sizes)
    with pytest.raises(ConfigurationError, match="version: expected 3"):
        train.check(EagleHeadOptions(version=1, start=tmp_path / "first"), SHORT, sizes)
