"""The recipe of SmolLM2's drafters on tiny models: many texts at once, and conversations of which the answers count."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.core.errors import ConfigurationError
from paceline.decoder.token_files import write_tokens
from paceline.heads.features import Conversations
from paceline.heads.frozen_model import FrozenTarget
from tests.fakes_models import generated

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "smollm2" / "recipe"
MODULES = ("gpu_decoder", "conversations", "ablation")
END = 5


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The recipe's modules, which are scripts in one folder and not an installed package."""
    monkeypatch.syspath_prepend(str(RECIPE))
    found = {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)
    return found


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_batched_greedy_texts_equal_transformers(recipe: dict[str, ModuleType], model: LlamaForCausalLM) -> None:
    """More prompts than rows, of unequal lengths, some longer than the room leaves: each its own greedy text."""
    made = recipe["gpu_decoder"]
    decoder = made.GpuDecoder(model, rows=3, room=32, end=END)
    prompts = [torch.randint(6, 61, (size,)).tolist() for size in (3, 9, 14, 5, 7, 2, 26, 11)]
    texts = decoder.texts([made.Prompt(ids, 0.0, 12) for ids in prompts])
    for ids, text in zip(prompts, texts, strict=True):
        assert text == generated(model, ids, max_new_tokens=min(12, 32 - len(ids)), eos_token_id=END)


def test_each_row_is_sampled_at_its_temperature(recipe: dict[str, ModuleType], model: LlamaForCausalLM) -> None:
    """Samples against the softmax, within four standard deviations; greedy rows among them stay greedy."""
    made, count, ids = recipe["gpu_decoder"], 3000, [7, 8, 9]
    decoder = made.GpuDecoder(model, rows=100, room=8, end=END)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    torch.manual_seed(0)
    for heat in (0.5, 2.0):
        texts = decoder.texts([made.Prompt(ids, heat if at % 2 else 0.0, 1) for at in range(2 * count)])
        assert {text[3] for text in texts[::2]} == {int(logits.argmax())}
        probs = (logits / heat).softmax(-1)
        drawn = torch.tensor([text[3] for text in texts[1::2]]).bincount(minlength=61) / count
        assert bool(((drawn - probs).abs() <= 4 * (probs * (1 - probs) / count).sqrt() + 1e-9).all())


def stream(texts: int = 70) -> np.ndarray:
    """Conversations end to end, with answers of 3 to 29 ids."""
    rng = np.random.default_rng(0)
    answers = [[*rng.integers(6, 40, size).tolist(), END] for size in rng.integers(3, 30, texts)]
    return np.array([token for answer in answers for token in [*CONVERSATION, *answer]])


CONVERSATION = [1, 50, 51, END, 1, 52, *range(20, 28), END, 1, 53]
"""A system's turn, a user's, and the beginning of an answer."""


def conversations(
    recipe: dict[str, ModuleType], model: LlamaForCausalLM, folder: Path, longest: int = 40
) -> Conversations:
    model.save_pretrained(folder)
    target = FrozenTarget(folder, (1, 2, 3))
    made = recipe["conversations"]
    texts = made.split(stream(), made.Markers([1, 50], [1, 53]))
    return Conversations(target, texts, texts[:2], longest=longest)


def test_only_answers_count_and_texts_start_at_their_beginning(
    recipe: dict[str, ModuleType], model: LlamaForCausalLM, tmp_path: Path
) -> None:
    corpus = conversations(recipe, model, tmp_path)
    texts = corpus.batch(0)
    assert texts.counted is not None
    assert torch.equal(texts.tokens, corpus.batch(0).tokens), "the same batch again"
    assert not torch.equal(texts.tokens, corpus.batch(1).tokens), "the next epoch has another order"
    assert texts.tokens.shape[0] == 64 and texts.streams.shape[-1] == 3 * 48
    assert texts.tokens[:, : len(CONVERSATION)].tolist() == [CONVERSATION] * 64
    begin = len(CONVERSATION) - 1
    for tokens, counted in zip(texts.tokens.tolist(), texts.counted.tolist(), strict=True):
        assert not any(counted[:begin]) and counted[begin]
        answer = [tokens[place + 1] for place, here in enumerate(counted) if here]
        assert answer == tokens[begin + 1 : begin + 1 + len(answer)], "one stretch"
        assert END not in answer[:-1] and (answer[-1] == END or len(CONVERSATION) + len(answer) == 40)


def test_missing_conversations_are_rejected(
    recipe: dict[str, ModuleType], model: LlamaForCausalLM, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="got 0 and 0"):
        conversations(recipe, model, tmp_path, longest=len(CONVERSATION) - 2)


def test_an_ablation_lists_each_variant_once(
    recipe: dict[str, ModuleType], model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = tmp_path / "target", tmp_path / "answers.bin"
    deeper = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 8})
    LlamaForCausalLM(deeper).save_pretrained(target)
    words = {i: f"w{i}" for i in range(61)} | {1: "<|im_start|>", 50: "system\n", 53: "assistant\n"}
    made = Tokenizer(models.WordLevel({word: i for i, word in words.items()}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Split("<|im_start|>", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(target)
    write_tokens(data, [stream()], vocab_size=61)
    write_tokens(tmp_path / "answers-eval.bin", [stream(8)], vocab_size=61)
    variants = ["EAGLE-3, replay", "DFlash, D-PACE"]
    asked = f"ablation.py --target {target} --data {data} --out {tmp_path / 'runs'} --tokens 200 --ids 40".split()
    monkeypatch.setattr(sys, "argv", [*asked, "--only", *variants])
    for _ in range(2):
        recipe["ablation"].main()
        rows = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
        assert [row["drafter"] for row in rows] == variants
    assert all(row["tau"] == pytest.approx(1 + sum(row["accepted"]), abs=0.003) for row in rows)
    assert (tmp_path / "runs" / "EAGLE-3-replay-0" / "model.safetensors").exists()
