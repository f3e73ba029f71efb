"""Greedy decoding in f32 gives, token for token, what `transformers` generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation import logits_process as hf

from paceline import SpeculativeGenerator
from paceline.decoder import steps
from tests.decoder.tiny import KINDS, VOCABULARY, Workshop, fresh, network
from tests.equality.settings import PROMPTS, Setting, plain, run, texts
from tests.fakes_models import generated

NEW = 40
EOS = 7


def hugging_face(workshop: Workshop, kind: str = "grouped", **wishes: object) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(workshop.checkpoint("target", kind), dtype=torch.float32)
    return [generated(model, prompt, max_new_tokens=NEW, **wishes) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_kind_equals_hugging_face(workshop: Workshop, kind: str) -> None:
    expected = hugging_face(workshop, kind)
    assert len({tuple(text[-NEW:]) for text in expected}) > 1
    target = workshop.decoder(kind=kind)
    assert plain(target, {}, new=NEW) == expected
    draft = workshop.decoder("draft", kind=kind)
    assert texts(run(SpeculativeGenerator(draft, target, k=4), {}, new=NEW)) == expected


def bad_words(_prompt: list[int]) -> hf.LogitsProcessor:
    return hf.NoBadWordsLogitsProcessor([[i] for i in range(0, VOCABULARY, 2)] + [[5, 9]], eos_token_id=EOS)


def late_end(prompt: list[int]) -> hf.LogitsProcessor:
    return hf.MinNewTokensLengthLogitsProcessor(len(prompt), NEW - 8, EOS)


BOTH = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
# name -> what generate is asked, what sample is asked in the same words, and the processor that says the rest
CASES = {
    "repetition penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}, None),
    "no repeated n-grams": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}, None),
    "both": (BOTH, BOTH, None),
    "bad words": ({"bad_words_ids": [[i] for i in range(0, VOCABULARY, 2)] + [[5, 9]]}, {}, bad_words),
    "a late end": ({"min_new_tokens": NEW - 8}, {"repetition_penalty": 1.3}, late_end),
}


@pytest.mark.parametrize("name", CASES)
def test_processors_equal_hugging_face(workshop: Workshop, name: str) -> None:
    theirs, ours, make = CASES[name]
    expected = hugging_face(workshop, eos_token_id=EOS, **{**ours, **theirs})
    assert expected != hugging_face(workshop, eos_token_id=EOS)
    draft, target = workshop.pair()
    for prompt, text in zip(PROMPTS, expected, strict=True):
        asked: Setting = {**ours, "eos_token_id": EOS, "logits_processor": [make(prompt)] if make else None}
        assert plain(target, asked, prompts=[prompt], new=NEW) == [text]
        generator = SpeculativeGenerator(draft, target, k=4)
        assert texts(run(generator, asked, prompts=[prompt], new=NEW)) == [text]


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_end_ids_equal_hugging_face(workshop: Workshop, backend: str) -> None:
    draft, target = workshop.pair(backend=backend)
    free = plain(target, {}, new=NEW)
    ends = [free[row][len(PROMPTS[row]) + place] for row, place in ((0, 3), (1, 0), (3, 10))]
    expected = hugging_face(workshop, eos_token_id=ends)
    assert any(len(text) < len(whole) for text, whole in zip(expected, free, strict=True))
    for sampler in (target, SpeculativeGenerator(draft, target, k=4), SpeculativeGenerator("ngram", target, k=2)):
        result = run(sampler, {"eos_token_id": ends}, new=NEW)
        assert texts(result) == expected
        reasons = ["stop" if text[-1] in ends else "length" for text in expected]
        assert result.finish_reasons == reasons


def test_the_checkpoints_end_ids_equal_hugging_face(workshop: Workshop, tmp_path: Path) -> None:
    model = network()
    end = plain(workshop.decoder(), {}, new=NEW)[0][len(PROMPTS[0]) + 5]
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.save_pretrained(tmp_path)
    target = fresh(tmp_path, batch_size=4)
    assert plain(target, {}, new=NEW) == [generated(model, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    assert plain(target, {"eos_token_id": []}, new=NEW) == plain(workshop.decoder(), {}, new=NEW)


def test_logits_of_every_row_are_close(workshop: Workshop) -> None:
    """Token equality is blind to small errors; this is not."""
    for kind in KINDS:
        model = LlamaForCausalLM.from_pretrained(workshop.checkpoint("target", kind), dtype=torch.float32)
        target = workshop.decoder(kind=kind)
        text = torch.randint(VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            expected = model(text).logits[0]
        rows = text.expand(4, -1).to(torch.int32).contiguous()
        made = steps.window(target, rows, torch.zeros(4, dtype=torch.int32), bucket=target.n_positions)[0]
        for line in made:
            torch.testing.assert_close(line, expected, rtol=1e-5, atol=2e-5)
