"""Training of heads: its objective by plain formulas; it learns, continues where it stopped, is bounded on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

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
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.losses import LOSSES
from paceline.heads.trainer import optimizers
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import NEWER, PARALLEL, Plain, config, random_head
from tests.eagle.lessons import LAYERS, SHORT, output, parts, stream, trained, trainer


def test_training_states_equal_a_decoders(workshop: Workshop) -> None:
    target = workshop.decoder(slots=1)
    text = list(range(3, 19))
    found = FrozenTarget(workshop.checkpoint(), LAYERS).read(torch.tensor([text]))
    _, last = prefill(target, 0, text, reads=FeatureSpec())
    _, streams = prefill(target, 0, text, reads=FeatureSpec(LAYERS))
    torch.testing.assert_close(found.last[0].float(), last, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found.streams[0].float(), streams, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("version", "changes", "options"),
    [
        (1, {}, {}), (3, {}, {}), (1, {}, {"precision": "bf16"}), (3, {}, {"precision": "bf16"}),
        (3, NEWER, {"loss": "lk_hybrid"}), (3, PARALLEL, {"loss": "nla"}),
    ],
)  # fmt: skip
def test_training_raises_acceptance(
    workshop: Workshop, tmp_path: Path, version: int, changes: dict[str, object], options: dict[str, Any]
) -> None:
    frozen, corpus, network, vocabulary = parts(workshop, tmp_path, version, **changes)
    given = {"tokens": 24 * 64 * 6, "batch_size": 8, "ce_weight": 1.0, "learning_rate": 3e-3}
    options = EagleTraining(**given, ttt_steps=1 if version == 1 else 3, **options)
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


def test_resuming_with_other_options_is_rejected(workshop: Workshop, tmp_path: Path) -> None:
    frozen, corpus, network, vocabulary = made = parts(workshop, tmp_path, 3)
    options = EagleTraining(tokens=24 * 8, ttt_steps=1, batch_size=8)
    trainer(made, options, tmp_path).run(lambda *_: None)
    other = FeatureCache(frozen, (stream() + 1) % VOCABULARY, SHORT, folder=tmp_path / "states")
    fewer = DraftVocab(vocabulary.ids.flip(0), VOCABULARY)
    for part, changed, texts, drafted in (
        ("a run with learning_rate 0.002, got 1e-05", replace(options, learning_rate=1e-5), corpus, vocabulary),
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
    for wrong, said in (
        ({"feature_weight": float("nan")}, "expected feature_weight, ce_weight and replay of at least 0, got less"),
        ({"ce_weight": -1.0}, "expected feature_weight, ce_weight and replay of at least 0, got less"),
        ({"batch_size": 48}, "change it, since the remaining sequences would be left out"),
        ({"loss": "kl"}, "loss: expected one of ce, lk_hybrid, nla, got 'kl'"),
        *(({"device": device}, device) for device in ("cuda:99", "tpu", "mps")),
    ):
        with pytest.raises(ConfigurationError, match=said):
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


def test_a_trained_head_continues_training(workshop: Workshop, tmp_path: Path) -> None:
    """Its layers, its ids and what it has learned stay: steps of no size leave its weights as they were."""

    def run(name: str, head: EagleHeadOptions, rate: float) -> dict[str, torch.Tensor]:
        trained(workshop, tmp_path / name, head, stream(), tokens=24 * 8 * 3, learning_rate=rate)
        return load_file(tmp_path / name / "model.safetensors")

    own = EagleHeadOptions(layers=LAYERS, draft_vocab_size=60, depth=2)
    first, fresh = run("first", own, 1e-2), run("fresh", own, 1e-12)
    assert (tmp_path / "first" / train.MEASURED).is_file()
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


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(
    ("version", "drafted", "changes"),
    [(1, VOCABULARY, {}), (3, 60, {}), (3, VOCABULARY, {}), (3, 60, NEWER), (3, 60, PARALLEL)],
)
def test_the_objective_equals_that_of_the_papers(
    workshop: Workshop, tmp_path: Path, version: int, drafted: int, changes: dict[str, object], every: bool
) -> None:
    """Place by place over plain recomputed paths: 0.8 to the power of the pass, cross-entropy over the drafted ids
    where the target's best is one of them, and for version 1 smooth L1 on the next hidden state. Where not every place
    counts, the means are of those that do.
    """
    target = workshop.decoder(slots=1)
    frozen, corpus, _, _ = parts(workshop, tmp_path, 3)
    made = random_head(
        config(target.config, version, **({"draft_vocab_size": drafted} if version == 3 else {}), **changes)
    )
    vocabulary = DraftVocab(made.weights["ids"] if version == 3 else torch.arange(VOCABULARY), VOCABULARY)
    reference = Plain(made, frozen.embedding, output(frozen))
    network = TrainableHead(made.config, frozen.embedding, output(frozen) if version == 1 else None)
    network.load_state_dict({name: x for name, x in made.weights.items() if name != "ids"})
    whole = corpus.batch(0)
    counted = torch.rand(whole.tokens[:2].shape, generator=torch.Generator().manual_seed(0)) < (2.0 if every else 0.4)
    texts = Texts(whole.tokens[:2], whole.last[:2], whole.streams[:2], None if every else counted)
    size, passes, wanted = texts.tokens.shape[1], 3, 0.0
    for number in range(passes):
        surprises, errors = [], []
        for row, (tokens, last, streams) in enumerate(
            zip(texts.tokens, texts.last.float(), texts.streams.float(), strict=True)
        ):
            real = last if version == 1 else streams
            for place in range(size - 1 - number):
                if not counted[row, place + 1 + number]:
                    continue
                hidden = reference.hidden(real[: place + 1], tokens[1 : place + 2 + number].tolist())
                logits = last[place + 1 + number] @ output(frozen).T
                errors.append(F.smooth_l1_loss(hidden, last[place + 1 + number]))
                if int(logits.argmax()) in vocabulary.ids.tolist():
                    distribution = logits[vocabulary.ids].softmax(-1)
                    surprises.append(-(distribution * reference.scores(hidden).log_softmax(-1)).sum())
        loss = torch.stack(surprises).mean()
        wanted += 0.8**number * float(loss if version == 3 else 0.1 * loss + torch.stack(errors).mean())
    found = objective(
        network, texts, EagleTraining(tokens=1, ttt_steps=passes), head=output(frozen), vocabulary=vocabulary
    )
    assert float(found.detach()) == pytest.approx(wanted, rel=1e-3)
    assert EagleTraining(tokens=1).passes(3) == 7, "as the paper's"


def test_lk_losses_optimise_the_acceptance_rate() -> None:
    """By the formulas of arXiv 2602.23881, place by place; both are least where the head is the target."""
    generator = torch.Generator().manual_seed(0)
    logits, wanted = torch.randn(4, 7, generator=generator) * 2, torch.randn(4, 7, generator=generator).softmax(-1)
    wanted[0, :3], logits[1] = 0.0, wanted[1].log()
    wanted[0] /= wanted[0].sum()
    for place, (scores, p) in enumerate(zip(logits, wanted, strict=True)):
        q = scores.softmax(-1)
        rate = sum(min(float(x), float(y)) for x, y in zip(p, q, strict=True))
        divergence = sum(float(x * (x / y).log()) for x, y in zip(p, q, strict=True) if x > 0)
        share = math.exp(-3 * rate)
        hybrid = share * divergence + (1 - share) * (1 - rate)
        assert float(LOSSES["nla"](logits, wanted)[place]) == pytest.approx(-math.log(rate), abs=1e-5)
        assert float(LOSSES["lk_hybrid"](logits, wanted)[place]) == pytest.approx(hybrid, abs=1e-5)
    assert all(float(LOSSES[name](logits, wanted)[1]) == pytest.approx(0, abs=1e-5) for name in ("nla", "lk_hybrid"))
    assert set(LOSSES) == {"ce", "nla", "lk_hybrid"}, "those that `EagleTraining` takes"


def test_chain_acceptance_is_measured_where_all_positions_count(workshop: Workshop, tmp_path: Path) -> None:
    """Texts that are cut to the counted positions, and full ones with a mask of them, have the same shares."""
    frozen, corpus, network, vocabulary = parts(workshop, tmp_path, 3)
    texts, depth, begin, end = corpus.batch(0), 3, 9, 20
    given = {"depth": depth, "head": output(frozen), "vocabulary": vocabulary}
    counted = torch.zeros(texts.tokens.shape, dtype=torch.bool)
    counted[:, begin:end] = True
    some = Texts(texts.tokens, texts.last, texts.streams, counted)
    short = Texts(texts.tokens[:, :end], texts.last[:, :end], texts.streams[:, :end])
    assert acceptance(network, some, skip=0, **given) == acceptance(network, short, skip=begin, **given)
    assert acceptance(network, some, skip=0, **given) != acceptance(network, texts, skip=begin, **given)
    counted[:, begin + depth :] = False
    with pytest.raises(ConfigurationError, match="space for 3 draft tokens"):
        acceptance(network, some, skip=0, **given)


def test_the_most_frequent_ids_are_drafted() -> None:
    vocabulary = DraftVocab.frequent(torch.tensor([3, 9, 1, 9, 0, 4]), 3)
    assert vocabulary.ids.tolist() == [1, 3, 5] and vocabulary.offsets.tolist() == [1, 2, 3]
    assert vocabulary.mask.tolist() == [False, True, False, True, False, True]
