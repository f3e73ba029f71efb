"""DFlash heads and PARD decoders that are trained: they learn, resume where they stopped, and draft when reloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.draft.dflash.config import DFlashHeadOptions
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.dflash.train import TrainableDFlash, config_of, fresh, train_dflash, write
from paceline.draft.options import PardOptions
from paceline.draft.pard_train import TrainablePard, train_pard
from paceline.heads.blocks import BlockNetwork, Supervision, acceptance, anchors_of, objective
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import TrainingData
from paceline.heads.frozen_model import FrozenTarget, Texts, transformers_model
from paceline.heads.losses import chain_loss, dpace
from paceline.heads.options import BlockTraining
from tests.decoder.tiny import VOCABULARY, Workshop, network
from tests.decoder.tiny import fresh as decoder
from tests.draft.block_heads import rounds
from tests.eagle.lessons import SHORT, stream
from tests.sampled import run, texts

K = 3
LAW = 16
TRAINING = BlockTraining(tokens=24 * 64 * 10, batch_size=16, learning_rate=1e-2, k=K, anchors=12)
HEAD = DFlashHeadOptions(layers=(0, 1), num_layers=2, draft_vocab_size=60, mask_token=95)
CASES: dict[str, Any] = {
    "dflash": (train_dflash, HEAD, {}),
    "dflash, all ids": (train_dflash, replace(HEAD, draft_vocab_size=None), {"dpace": True}),
    "pard": (train_pard, PardOptions(num_layers=1, mask_token=95), {"loss": "lk_hybrid"}),
}


def data() -> TrainingData:
    return TrainingData(stream())


def chains(folder: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row["greedy chains"] for row in rows if "greedy chains" in row]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose law is a table: after id i comes i + 1, modulo 16, at every position."""
    folder, model = tmp_path_factory.mktemp("counter"), network()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = torch.arange(LAW)
        model.lm_head.weight.zero_()
        model.lm_head.weight[(ids + 1) % LAW] = 4 * F.normalize(model.model.embed_tokens.weight[ids], dim=-1)
    model.save_pretrained(folder)
    return folder


def counted_up() -> TrainingData:
    starts = np.random.default_rng(0).integers(0, LAW, 96)
    return TrainingData(((starts[:, None] + np.arange(24)) % LAW).astype(np.int32).flatten())


@pytest.mark.parametrize("case", ["dflash", pytest.param("dflash, all ids", marks=pytest.mark.full), "pard"])
def test_training_learns_a_law_and_the_result_drafts(counter: Path, tmp_path: Path, case: str) -> None:
    train, options, changes = CASES[case]
    given = {"texts": SHORT, "out": tmp_path / "out", "report": lambda *_: None}
    training = replace(TRAINING, **changes)
    shares = train(counter, counted_up(), options, options=training, work=tmp_path / "work", **given)
    curve = chains(tmp_path / "work")
    assert len(curve) > 1 and sum(curve[-1]) > sum(curve[0]) and shares is not None and shares[1] > 0.6
    assert [round(share, 4) for share in shares] == curve[-1] == sorted(curve[-1], reverse=True)
    target = decoder(counter, backend="eager", amp="f32")
    generator = SpeculativeGenerator(AutoDrafter.from_pretrained(tmp_path / "out", target, k=K), target)
    made = generator.sample([[5, 6, 7]], max_new_tokens=40, return_dict=True)
    assert texts(made) == texts(run(target, [[5, 6, 7]], max_new_tokens=40))
    statistics = made.statistics
    assert statistics.num_accepted_tokens > 1.5 * statistics.num_drafts, "the folder drafts what it has learnt"


def test_a_trained_head_is_the_one_that_is_reloaded(workshop: Workshop, tmp_path: Path) -> None:
    """Logits of a block in training equal those of the decoding head, which reads the folder."""
    target = decoder(workshop.checkpoint(), backend="eager", amp="f32")
    sizes = ModelConfig.from_pretrained(workshop.checkpoint())
    frozen = FrozenTarget(workshop.checkpoint(), (0, 1))
    counts = data().counts(VOCABULARY)
    config = config_of(HEAD, sizes, counts, k=K)
    vocabulary = DraftVocab.frequent(counts, 60)
    trained = fresh(config, frozen, vocabulary, depth=sizes.num_layers)
    for parameter in trained.parameters():
        parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    write(tmp_path, trained, vocabulary, depth=sizes.num_layers, shares=[])
    made = DFlashDrafter.from_pretrained(tmp_path, target, K)
    prompt = stream()[:9].tolist()
    text, own = rounds(made, target, prompt, 16)
    tokens = torch.tensor([text])
    with torch.no_grad():
        every = frozen.model(tokens, output_hidden_states=True).hidden_states
    read = Texts(tokens, every[-1], torch.cat([every[i] for i in (0, 1)], -1))
    drafts, logits = own[0]
    found = trained.blocks(read, torch.tensor([[len(prompt)]]), K)[0, 0]
    torch.testing.assert_close(logits[..., vocabulary.ids].reshape(K, -1), found, rtol=2e-3, atol=2e-3)
    assert drafts == vocabulary.ids[found.argmax(-1)].tolist()


@pytest.mark.parametrize("causal", [False, True], ids=["dflash", "pard"])
def test_a_block_sees_no_later_text_and_no_other_block(workshop: Workshop, causal: bool) -> None:
    """With other tokens and states from the anchor on, or with another block, its logits stay."""
    frozen = FrozenTarget(workshop.checkpoint(), (0, 1))
    sizes = ModelConfig.from_pretrained(workshop.checkpoint())
    made: BlockNetwork
    if causal:
        made = TrainablePard(transformers_model(workshop.checkpoint("draft"), torch.float32), 95)
    else:
        made = TrainableDFlash(
            config_of(replace(HEAD, draft_vocab_size=None), sizes, data().counts(VOCABULARY), k=K),
            frozen.embedding,
            frozen.output.detach(),
        )
    tokens = torch.from_numpy(stream()[:24].astype("int64")).view(1, -1)
    other = tokens.clone()
    other[0, 9:] = (other[0, 9:] + 5) % VOCABULARY
    one = made.blocks(frozen.read(tokens), torch.tensor([[3, 8]]), K)
    two = made.blocks(frozen.read(other), torch.tensor([[8, 15]]), K)
    torch.testing.assert_close(one[0, 1], two[0, 0], rtol=1e-5, atol=1e-5)
    again = frozen.read(torch.cat([(tokens[:, :8] + 1) % VOCABULARY, tokens[:, 8:]], 1))
    assert not torch.allclose(one[0, 1], made.blocks(again, torch.tensor([[3, 8]]), K)[0, 1], atol=1e-3)


def test_a_pard_block_equals_the_decoder_on_mask_tokens(workshop: Workshop) -> None:
    model = transformers_model(workshop.checkpoint("draft"), torch.float32)
    tokens = torch.from_numpy(stream()[:24].astype("int64")).view(1, -1)
    read = FrozenTarget(workshop.checkpoint()).read(tokens)
    found = TrainablePard(model, 95).blocks(read, torch.tensor([[6, 11]]), K)
    for index, anchor in enumerate((6, 11)):
        window = torch.cat([tokens[:, : anchor + 1], torch.full((1, K - 1), 95)], 1)
        torch.testing.assert_close(found[0, index], model(window).logits[0, -K:], rtol=1e-4, atol=1e-4)


def test_a_stopped_run_resumes_and_equals_a_whole_one(workshop: Workshop, tmp_path: Path) -> None:
    ends = []
    for name, minutes in (("whole", None), ("stopped", 0.0)):  # 0: one step and no more
        shares, runs = None, 0
        while shares is None:
            training = replace(TRAINING, tokens=24 * TRAINING.batch_size * 4, max_minutes=minutes)
            given = {"work": tmp_path / name, "out": tmp_path / f"{name}-out", "report": lambda *_: None}
            shares, runs = (
                train_dflash(workshop.checkpoint(), data(), HEAD, texts=SHORT, options=training, **given),
                runs + 1,
            )
        assert runs == (1 if minutes is None else 4)
        ends.append((tmp_path / f"{name}-out" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]


def test_only_answers_count_in_a_block(workshop: Workshop) -> None:
    """Blocks begin where their drafts count, and drafts after the end of an answer do not."""
    counted = torch.zeros(1, 24, dtype=torch.bool)
    counted[0, 10:14] = True
    frozen = FrozenTarget(workshop.checkpoint(), (0, 1))
    read = frozen.read(torch.from_numpy(stream()[:24].astype("int64")).view(1, -1))
    some = Texts(read.tokens, read.last, read.streams, counted)
    assert anchors_of(some, 4, K, seed=0).tolist() == [[10, 11, 12, 13]]

    class Exact(BlockNetwork):
        """The target's own logits at the counted positions, and at no other."""

        def blocks(self, texts: Texts, anchors: torch.Tensor, k: int) -> torch.Tensor:
            places = anchors.unsqueeze(-1) + torch.arange(k)
            logits = F.linear(texts.last.float(), frozen.output.detach())[0, places]
            return torch.where(counted[0, places].unsqueeze(-1), logits, -logits)

    given = Supervision(frozen.output.detach(), DraftVocab(torch.arange(VOCABULARY), VOCABULARY))
    assert acceptance(Exact(), some, given, k=K, skip=0) == [1.0] * K
    loss = objective(Exact(), some, BlockTraining(tokens=1, k=K, loss="nla"), given=given, seed=0)
    assert float(loss) == pytest.approx(0, abs=1e-4)
    with pytest.raises(ConfigurationError, match="space for 3 draft tokens"):
        acceptance(Exact(), replace(some, counted=torch.zeros(1, 24, dtype=torch.bool)), given, k=K, skip=0)


def test_dpace_weighs_a_position_by_the_drafts_that_depend_on_it() -> None:
    """By the formula of arXiv 2605.18810: sums over the later positions of the product of smoothed rates."""
    rates = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.8, 0.4], [0.9, 0.9, 0.9]])
    known = torch.tensor([[True, True, True], [True, True, False], [True, False, True]])
    found = dpace(rates, known)
    for row in range(3):
        smooth = [0.5 + 0.5 * float(rate) if know else 0.5 for rate, know in zip(rates[row], known[row], strict=True)]
        for place in range(3):
            wanted = 0.0
            for last in range(place, 3):
                if known[row, last] and known[row, place]:
                    product = 1.0
                    for one in smooth[: last + 1]:
                        product *= one
                    wanted += product
            assert float(found[row, place]) == pytest.approx(wanted, rel=1e-5)
    losses = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    falling = chain_loss(losses, rates[:2], known[:2], decay=0.5)
    assert float(falling) == pytest.approx(2.5 + 0.5 * 3.5 + 0.25 * 3.0)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (DFlashHeadOptions(layers=(9,)), r"streams from 0 to 1 of this target, .*got \[9\]"),
        (DFlashHeadOptions(draft_vocab_size=0), "expected 1 to 96 ids"),
        (DFlashHeadOptions(mask_token=96), "an id below that"),
        (PardOptions(num_layers=3), "expected 1 to 2, the target's layers, got 3"),
        (PardOptions(mask_token=96), "expected an id below 96, got 96"),
    ],
)
def test_options_the_target_cannot_have_are_rejected(workshop: Workshop, head: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        head.check(ModelConfig.from_pretrained(workshop.checkpoint()))


@pytest.mark.parametrize(
    "wrong", [{"k": 0}, {"anchors": 0}, {"decay": 0.0}, {"loss": "kl"}, {"tokens": 0}, {"batch_size": 7}]
)
def test_training_options_out_of_range_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        BlockTraining(**wrong)
