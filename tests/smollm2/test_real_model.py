"""SmolLM2-135M-Instruct: greedy tokens are transformers' own, from the fetched folder and from the GGUF file itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline import AutoDecoder
from paceline.auto import SamplingDecoder
from paceline.decoder import steps
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights import hub
from paceline.decoder.weights.checkpoint import load_weights
from paceline.text.tokenizer import has_tokenizer, load_tokenizer
from tests.fakes_models import generated
from tests.sampled import run, texts

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about rain.",
    "What is 12 + 30?",
    "Say hello in Spanish.",
    "Who wrote Hamlet?",
    "List two fruits as JSON.",
    "Explain gravity in one sentence.",
]
NEW = 24
Texts = list[list[int]]


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> Texts:
    tokenizer: Any = load_tokenizer(smollm2)
    return [
        tokenizer.apply_chat_template(chat(question), add_generation_prompt=True, return_dict=False)
        for question in QUESTIONS
    ]


@pytest.fixture
def alone(smollm2: Path, tmp_path: Path) -> Path:
    """The GGUF file in a separate folder: with others in it, transformers takes the tokenizer's settings from those."""
    path = tmp_path / GGUF
    path.symlink_to(smollm2 / GGUF)
    return path


def loaded(path: Path) -> SamplingDecoder:
    """All prompts at a time, in graphs that the folder and the file share."""
    return AutoDecoder.from_pretrained(path, amp="f32", batch_size=8, n_positions=128, context_length_estimate=64)


def greedy(decoder: SamplingDecoder, prompts: Texts) -> Texts:
    return texts(run(decoder, prompts, max_new_tokens=NEW))


def test_greedy_tokens_of_the_fetched_folder_equal_transformers(smollm2: Path, prompts: Texts) -> None:
    found = greedy(loaded(smollm2), prompts)
    judge = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    assert found[:3] == [generated(judge, prompt, max_new_tokens=NEW) for prompt in prompts[:3]]
    tokenizer: Any = load_tokenizer(smollm2)
    answer = tokenizer.decode(found[0][len(prompts[0]) :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.full
def test_the_file_itself_is_read_as_transformers_reads_it(alone: Path, prompts: Texts) -> None:
    judge = AutoModelForCausalLM.from_pretrained(alone.parent, gguf_file=GGUF, dtype=torch.float32).eval()
    state = judge.state_dict()
    weights = load_weights(alone, ModelConfig.from_pretrained(alone), torch.float32)
    assert {name: torch.equal(tensor, state[name]) for name, tensor in weights.items()} == dict.fromkeys(weights, True)
    assert len(weights) == len(list(judge.parameters()))
    decoder = loaded(alone)
    with torch.no_grad():
        expected = judge(torch.tensor(prompts[:1])).logits[0, -1]
    torch.testing.assert_close(steps.prefill(decoder, 0, prompts[0])[0][0, 0], expected, atol=1e-4, rtol=0)
    assert greedy(decoder, prompts[:1]) == [generated(judge, prompts[0], max_new_tokens=NEW)]


def test_folder_and_file_have_the_same_configuration(smollm2: Path) -> None:
    found = ModelConfig.from_pretrained(smollm2 / GGUF)
    assert found.eos_token_ids == (2, 4, 0)  # <|im_end|>, and by their text <reponame> and <|endoftext|>
    assert found == ModelConfig.from_pretrained(smollm2)
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (30, 576, 49152)
    assert (found.rope.theta, found.rms_norm_eps, found.tie_word_embeddings) == (100_000.0, 1e-5, True)


def test_a_name_and_a_file_have_a_tokenizer(smollm2: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline verify` takes texts and stop strings from the tokenizer, and used to find it in folders only."""
    monkeypatch.setattr(hub, "fetched", lambda _row: smollm2)
    assert all(map(has_tokenizer, (Path("smollm2"), smollm2, alone)))
    assert not has_tokenizer(alone.parent / "nowhere")


def test_tokenizer_and_chat_template_equal_the_files(smollm2: Path, alone: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(alone.parent, gguf_file=GGUF)
    for path in (smollm2, alone):
        ours: Any = load_tokenizer(path)
        assert ours.get_vocab() == theirs.get_vocab()
        assert (ours.bos_token, ours.eos_token, ours.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
        for question in (*QUESTIONS, "I'm 12.5 % caf\u00e9,\n\n  d\u00e9j\u00e0-vu \u6f22\u5b57 \U0001f642"):
            assert ours.encode(question) == theirs.encode(question)
            asked = {"add_generation_prompt": True, "tokenize": False}
            text = ours.apply_chat_template(chat(question), **asked)
            assert text == theirs.apply_chat_template(chat(question), **asked)
            assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text
        # transformers does not know this file's split and cuts the spaces before a digit in two; the published
        # tokenizer has a token for them, since it makes every digit a piece of its own first.
        assert ours.tokenize("a  2") == ["a", "\u0120\u0120", "2"]
