"""Training data of drafters: chats with a template and a mask, traces, and hidden states that others wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.cli.train import training_data
from paceline.core.errors import ConfigurationError, PromptError
from paceline.eagle import train
from paceline.eagle.config import EagleHeadOptions, EagleTraining
from paceline.experiments.trace import Trace, TraceText, save_trace
from paceline.heads.features import Conversation, Conversations, TrainingData, read_features
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.options import TEXTS_PER_FILE, CachedTextOptions
from paceline.medusa import train as medusa
from paceline.medusa.config import MedusaTexts
from paceline.text.chat import chat_answers
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import refused
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.lessons import LAYERS, stream

TEMPLATE = (
    "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}{{ m.content }} w3 w4 {% endfor %}"
    "{% if add_generation_prompt %}w2 {% endif %}"
)
OPTIONS = CachedTextOptions(length=24, prompt=6, eval_samples=4)
CHAT = [("user", "w9 w8"), ("assistant", "w7 w6"), ("user", "w5"), ("assistant", "w10 w11 w12")]
MESSAGES = [{"role": role, "content": content} for role, content in CHAT]


@pytest.fixture
def talker(target: Path, tmp_path: Path) -> Path:
    """The small target with a chat template, whose answers end with w3."""
    folder = shutil.copytree(target, tmp_path / "talker")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "w3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def chats(path: Path, count: int) -> Path:
    rows = []
    for index in range(count):
        content = [f"w{40 + (index + place) % 40}" for place in range(6)]
        turns = [("user", " ".join(content[:2])), ("assistant", " ".join(content[2:]))]
        messages = [{"role": role, "content": text} for role, text in turns]
        shared = [{"from": "human" if role == "user" else "gpt", "value": text} for role, text in turns]
        rows.append({"messages": messages} if index % 2 else {"conversations": shared})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_of_a_chat_are_marked_to_their_end(talker: Path) -> None:
    ids, marked = chat_answers(load_tokenizer(talker), MESSAGES)
    assert ids == [1, 9, 8, 3, 4, 2, 7, 6, 3, 4, 1, 5, 3, 4, 2, 10, 11, 12, 3, 4]
    assert [index for index, one in enumerate(marked) if one] == [6, 7, 8, 15, 16, 17, 18]


def test_chats_without_an_answer_or_written_anew_are_rejected(talker: Path) -> None:
    tokenizer = load_tokenizer(talker)
    with pytest.raises(PromptError, match="at least one of the assistant's"):
        chat_answers(tokenizer, MESSAGES[:1])
    tokenizer.chat_template = "{{ 'w' ~ (messages | length) }} " + TEMPLATE  # type: ignore[attr-defined]
    with pytest.raises(PromptError, match="earlier turns anew"):
        chat_answers(tokenizer, MESSAGES)


def test_chats_are_learnt_from_their_beginning_and_their_answers_alone(talker: Path, tmp_path: Path) -> None:
    data = training_data([chats(tmp_path / "chats.jsonl", TEXTS_PER_FILE + 4)], talker)
    assert len(data.texts) == TEXTS_PER_FILE + 4 and data.skip(OPTIONS) == 0
    assert int(data.counts(VOCABULARY)[1]) == len(data.texts)
    frozen = FrozenTarget(talker, LAYERS)
    corpus = data.corpus(frozen, OPTIONS, folder=tmp_path / "states")
    batch = corpus.batch(0)
    assert batch.counted is not None and (len(batch), len(corpus.eval_texts())) == (TEXTS_PER_FILE, 4)
    for tokens, counted in zip(batch.tokens, batch.counted, strict=True):
        begin = tokens.tolist().index(2)  # the answer's first token is predicted there
        assert counted.nonzero().flatten().tolist() == list(range(begin, begin + 5))
    torch.testing.assert_close(batch.last, frozen.read(batch.tokens).last)
    firsts = {tuple(row) for part in (batch, corpus.eval_texts()) for row in part.tokens[:, :5].tolist()}
    assert len(firsts) > 32, "the texts to measure on are others"


def test_medusa_heads_learn_the_answers_of_chats_alone(talker: Path, tmp_path: Path) -> None:
    data = training_data([chats(tmp_path / "chats.jsonl", TEXTS_PER_FILE + 4)], talker)
    frozen, plan = FrozenTarget(talker), MedusaTexts(tokens=10_000, length=24, prompt=6, eval_samples=4)
    folder = medusa.gather(frozen, data, plan, work=tmp_path / "work", report=lambda *_: None)
    (windows,), (measured,) = (read_features(folder / part, prompt=6) for part in ("train", "measure"))
    assert (len(windows), len(measured)) == (TEXTS_PER_FILE, 4)
    options = CachedTextOptions(length=24, prompt=6, eval_samples=4)
    wanted = data.corpus(frozen, options, folder=tmp_path / "states").batch(0)
    assert torch.equal(windows.tokens, wanted.tokens) and torch.equal(windows.last, wanted.last)
    assert windows.counted is not None and torch.equal(windows.counted, wanted.counted)
    assert 0 < windows.counted.float().mean() < 0.5, "most of a row is a user's text, the template, or empty"


def test_continuations_of_chats_are_rejected_before_the_target_is_read(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.heads.frozen_model.FrozenTarget", None)
    data = chats(tmp_path / "chats.jsonl", 2)
    options = ("--length", 24, "--prompt-tokens", 6, "--self-distill-tokens", 48)
    asked = ("train", "medusa", "--target", talker, "--data", data, "--out", tmp_path / "heads", *options)
    refused("self_distill_tokens: expected 0 for chats", *asked)
    assert not (tmp_path / "heads").exists()


def test_rows_that_are_no_chats_are_named(talker: Path, tmp_path: Path) -> None:
    path = chats(tmp_path / "chats.jsonl", 2)
    path.write_text(path.read_text() + '{"prompt": "w5"}\n')
    with pytest.raises(ConfigurationError, match=r"got line 3 of .*chats.jsonl"):
        training_data([path], talker)
    (tmp_path / "text.txt").write_text("w5 w6")
    with pytest.raises(ConfigurationError, match="several kinds"):
        training_data([path, tmp_path / "text.txt"], talker)
    with pytest.raises(ConfigurationError, match="at least 64 conversations"):
        data = TrainingData(np.arange(3), (Conversation(np.arange(3), np.ones(3, dtype=bool)),) * 9)
        data.corpus(FrozenTarget(talker), OPTIONS, folder=tmp_path)


def test_a_trace_is_data(talker: Path, tmp_path: Path) -> None:
    text = TraceText("a", "chat", (5, 6), (7, 8, 9), 0, 32, "length")
    trace = Trace("t", "f", {}, (), VOCABULARY, (text,), (), {})
    save_trace(tmp_path / "one.json.gz", trace)
    (found,) = training_data([tmp_path / "one.json.gz"], talker).texts
    assert found.tokens.tolist() == [5, 6, 7, 8, 9] and found.answer.tolist() == [False] * 2 + [True] * 3
    save_trace(tmp_path / "two.json.gz", Trace("t", "f", {}, (), 7, (text,), (), {}))
    with pytest.raises(ConfigurationError, match="a target with 96 ids, got 7"):
        training_data([tmp_path / "two.json.gz"], talker)


def foreign(kind: str, folder: Path, frozen: FrozenTarget) -> list[Tensor]:
    """Files of a kind, made of transformers' own outputs. Returns their texts."""
    folder.mkdir()
    rows = torch.from_numpy(stream()[: (TEXTS_PER_FILE + 4) * 20].astype(np.int64)).view(-1, 20)
    with torch.no_grad():
        made = frozen.model(rows, output_hidden_states=True)
    caught: list[Tensor] = []
    hook = frozen.model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    with torch.no_grad():
        last = frozen.model.model(rows).last_hidden_state
    hook.remove()
    streams = [made.hidden_states[0], made.hidden_states[1], caught[0]]
    mask = torch.arange(20) >= 6
    for index, tokens in enumerate(rows):
        each = [one[index] for one in streams]
        every = torch.stack([*each, caught[0][index]], 1).contiguous()
        files = {"token_ids": tokens, "hidden_states": every}
        if kind == "specforge":
            states = {"aux_hidden_state": torch.cat(each, -1)[None], "hidden_state": last[index][None]}
            torch.save({"input_ids": tokens, "loss_mask": mask.long(), **states}, folder / f"data_{index}.ckpt")
        elif kind == "speculators, older":
            rest = {"input_ids": tokens, "loss_mask": mask, "hidden_states": [*each, caught[0][index]]}
            torch.save(rest, folder / f"data_{index}.pt")
        else:
            if kind == "speculators, 8 bits":
                scales = every.abs().amax((1, 2), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
                files |= {"hidden_states": (every / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}
            save_file(files, folder / f"hs_{index}.safetensors")
    return list(rows)


@pytest.mark.parametrize("kind", ["specforge", "speculators", "speculators, 8 bits", "speculators, older"])
def test_states_of_others_equal_the_target_s(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    frozen = FrozenTarget(workshop.checkpoint(), LAYERS)
    rows = foreign(kind, tmp_path / "states", frozen)
    data = training_data([tmp_path / "states"], workshop.checkpoint())
    corpus = data.corpus(frozen, OPTIONS, folder=tmp_path)
    batch = corpus.batch(0)
    assert torch.equal(batch.tokens, torch.stack(rows[:TEXTS_PER_FILE])) and len(corpus.eval_texts()) == 4
    wanted = frozen.read(batch.tokens)
    error = 0.07 if kind == "speculators, 8 bits" else 2e-2
    torch.testing.assert_close(batch.last, wanted.last, rtol=error, atol=error)
    torch.testing.assert_close(batch.streams, wanted.streams, rtol=error, atol=error)
    assert batch.counted is not None
    first = 5 if kind in ("specforge", "speculators, older") else 0
    assert batch.counted[0].nonzero().flatten().tolist() == list(range(first, 19))
    other = FrozenTarget(workshop.checkpoint(), (0, 1))
    with pytest.raises(ConfigurationError, match="states of width 96, where the head reads 64"):
        data.corpus(other, OPTIONS, folder=tmp_path)


def test_a_head_learns_from_states_of_others(workshop: Workshop, tmp_path: Path) -> None:
    foreign("specforge", tmp_path / "states", FrozenTarget(workshop.checkpoint(), LAYERS))
    shares = train.train(
        workshop.checkpoint(), training_data([tmp_path / "states"], workshop.checkpoint()),
        EagleHeadOptions(layers=LAYERS, draft_vocab_size=60, depth=3), texts=OPTIONS,
        options=EagleTraining(tokens=20 * 64, ttt_steps=2, batch_size=32, replay=0.5, dpace=True),
        work=tmp_path / "work", out=tmp_path / "out", report=lambda *_: None,
    )  # fmt: skip
    assert shares is not None and len(shares) == 3 and (tmp_path / "out" / "model.safetensors").is_file()


def test_a_replayed_text_ends_in_the_head_s_own_drafts(workshop: Workshop, tmp_path: Path) -> None:
    """The text up to a rejected round, then that round's drafts, with the target's states on them."""
    from tests.eagle.lessons import output, parts

    frozen, corpus, network, vocabulary = parts(workshop, tmp_path, 3)
    whole = corpus.batch(0)
    texts = Texts(whole.tokens[:6], whole.last[:6], whole.streams[:6])
    given = {"head": output(frozen), "vocabulary": vocabulary}
    found = train.replayed(network, texts, 3, target=frozen, seed=0, **given)
    agreed, drafts = train._agreements(network, texts, 3, **given)
    assert found.counted is not None and found.counted.any()
    for row in range(6):
        places = found.counted[row].nonzero().flatten().tolist()
        begin = places[0] - 1  # the round begins there
        assert places == list(range(begin + 1, begin + 4)) and not agreed[row, 2, begin], "a draft is rejected"
        assert found.tokens[row, : begin + 2].tolist() == texts.tokens[row, : begin + 2].tolist()
        assert found.tokens[row, begin + 2 : begin + 5].tolist() == drafts[row, :, begin].tolist()
    torch.testing.assert_close(found.last, frozen.read(found.tokens).last)


def test_weights_of_a_target_on_a_gpu_are_halves(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bf16 need no weights in float32, which would take twice the memory."""
    asked: list[torch.dtype] = []

    def stop(_: object, dtype: torch.dtype) -> None:
        asked.append(dtype)
        raise InterruptedError("the rest needs the device")

    monkeypatch.setattr("paceline.heads.frozen_model.transformers_model", stop)
    monkeypatch.setattr("paceline.heads.frozen_model.check_device", lambda _: None)
    for precision, device in (("bf16", "cuda"), ("f32", "cuda"), ("bf16", "cpu")):
        with pytest.raises(InterruptedError):
            FrozenTarget(workshop.checkpoint(), precision=precision, device=device)
    assert asked == [torch.bfloat16, torch.float32, torch.float32]


def test_conversations_are_cut_to_the_length_and_need_an_answer_within(workshop: Workshop) -> None:
    late = np.arange(30) >= 26
    texts = [Conversation(np.arange(30), late)] * 3 + [Conversation(np.arange(30), np.arange(30) >= 4)] * TEXTS_PER_FILE
    corpus = Conversations(FrozenTarget(workshop.checkpoint()), texts, texts[-1:], longest=24)
    assert corpus.batches == 1 and corpus.batch(0).tokens.shape == (TEXTS_PER_FILE, 32)
