"""Calls of `generate` that run on our engine, pipelines, and streamers."""

from __future__ import annotations

import logging
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.generation import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer

from paceline import HuggingFaceGenerationAdapter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from tests.fakes_models import V, load, network, saved
from tests.huggingface.conftest import Both
from tests.huggingface.test_adapter import CALLS, GREEDY, MASK, ONE, PADDED, SAMPLED, EndOn, Favour

NEW = {"max_new_tokens": 20, "pad_token_id": 0}


@pytest.fixture(scope="module")
def drafted(both: Both) -> HuggingFaceGenerationAdapter:
    return HuggingFaceGenerationAdapter(SpeculativeGenerator(both.draft, both.decoder, k=3))


class Kept(BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
    """Calls that a streamer received."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def expected(both: Both, ids: Tensor = ONE, **asked: Any) -> Tensor:
    made: Tensor = both.theirs.generate(ids, attention_mask=(ids != 0).long(), **NEW, **asked)
    return made


DRAFTS: dict[str, Callable[[Both], dict[str, Any]]] = {
    "a generator's own": lambda _both: {},
    "a decoder's": lambda both: {"assistant_model": both.draft},
    "an adapter's": lambda both: {"assistant_model": HuggingFaceGenerationAdapter(both.draft)},
    "of prompt lookup": lambda _both: {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3},
}


@pytest.mark.parametrize("name", ["greedy", "penalties", "bad words", "a late end"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_keep_the_tokens_of_transformers(
    both: Both, drafted: HuggingFaceGenerationAdapter, drafts: str, name: str
) -> None:
    """Padding included: processors see it as they do in transformers. Eight rows queue for six slots."""
    model, asked = both.ours, DRAFTS[drafts](both)
    rows = [torch.cat((expected(both), ONE), 1)] if "lookup" in drafts else [ONE]
    if not asked:
        model, rows = drafted, [ONE, PADDED, PADDED.repeat(4, 1)]
    for ids in rows:
        made = model.generate(ids, attention_mask=(ids != 0).long(), **NEW, **CALLS[name], **asked)
        assert torch.equal(made, expected(both, ids, **CALLS[name]))
        assert model.statistics is not None and model.statistics.num_draft_tokens > 0
        assert "assistant_model" not in asked or model.statistics.num_accepted_tokens > 0


def characters(text: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one character for each id."""
    words = Tokenizer(models.WordLevel({sign: number for number, sign in enumerate(text)}, unk_token=text[0]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED], ids=["greedy", "sampling"])
def test_an_assistant_with_another_tokenizer_keeps_the_tokens(
    both: Both, tmp_path: Path, asked: dict[str, Any]
) -> None:
    """Its ids, and the rows of its weights, are the target's in the opposite order: it drafts as the target does."""
    signs = (string.ascii_letters + string.digits)[:V]
    other = network()
    with torch.no_grad():
        for matrix in (other.model.embed_tokens.weight, other.lm_head.weight):
            matrix.copy_(matrix.flip(0))
    assistant = load(saved(other, tmp_path), slots=6)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), **NEW, **asked}
    pair = {"tokenizer": characters(signs), "assistant_tokenizer": characters(signs[::-1])}
    torch.manual_seed(3)
    made = both.ours.generate(ONE, assistant_model=assistant, **given, **pair)
    statistics = both.ours.statistics
    assert statistics is not None and statistics.num_accepted_tokens > 0
    torch.manual_seed(3)
    plain = HuggingFaceGenerationAdapter(SpeculativeGenerator(None, both.decoder, k=0)).generate(ONE, **given)
    assert torch.equal(made, plain)
    if asked is GREEDY:
        assert torch.equal(made, expected(both, **asked))
    with pytest.raises(ConfigurationError, match="assistant_tokenizer: expected the target's tokenizer with"):
        both.ours.generate(ONE, assistant_model=assistant, **given, assistant_tokenizer=pair["assistant_tokenizer"])


def test_sampled_tokens_depend_on_the_seed_and_not_on_drafts(both: Both, drafted: HuggingFaceGenerationAdapter) -> None:
    plain = HuggingFaceGenerationAdapter(SpeculativeGenerator(None, both.decoder, k=3))
    asked: dict[str, Any] = {"attention_mask": MASK, "num_return_sequences": 2, **NEW, **SAMPLED}
    made = []
    for model, seed in ((plain, 4), (drafted, 4), (drafted, 5)):
        torch.manual_seed(seed)
        made.append(model.generate(PADDED, **asked))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[1], made[2])
    assert not torch.equal(made[0][0], made[0][1])
    torch.manual_seed(4)
    processed = drafted.generate(PADDED, renormalize_logits=True, **asked)  # the filters run as processors then
    assert torch.equal(processed, made[0])
    torch.manual_seed(4)
    assisted = both.ours.generate(
        ONE, attention_mask=torch.ones_like(ONE), assistant_model=both.draft, **NEW, **SAMPLED
    )
    torch.manual_seed(4)
    assert torch.equal(assisted, plain.generate(ONE, attention_mask=torch.ones_like(ONE), **NEW, **SAMPLED))


def test_an_assisted_call_returns_scores(both: Both) -> None:
    asked: dict[str, Any] = {
        "attention_mask": torch.ones_like(ONE), "repetition_penalty": 1.3, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True, **NEW,
    }  # fmt: skip
    theirs, ours = both.theirs.generate(ONE, **asked), both.ours.generate(ONE, assistant_model=both.draft, **asked)
    assert torch.equal(ours.sequences, theirs.sequences)
    for kind in ("scores", "logits"):
        torch.testing.assert_close(
            torch.stack(getattr(ours, kind)), torch.stack(getattr(theirs, kind)), atol=1e-4, rtol=1e-4
        )
    assert both.ours.statistics is not None and both.ours.statistics.num_accepted_tokens > 0


def test_an_assisted_call_applies_processors_and_criteria(both: Both) -> None:
    asked: dict[str, Any] = {"logits_processor": [Favour()]}
    free = expected(both, **asked)
    criteria = StoppingCriteriaList([EndOn(int(free[0, ONE.shape[1] + 7]))])
    made = both.ours.generate(
        ONE, attention_mask=torch.ones_like(ONE), assistant_model=both.draft, stopping_criteria=criteria, **NEW, **asked
    )
    assert torch.equal(made, expected(both, stopping_criteria=criteria, **asked))
    assert made.shape[1] < free.shape[1]


@pytest.mark.parametrize("how", ["loop", "generator", "assistant"])
def test_a_streamer_gets_the_prompt_and_every_token(
    both: Both, drafted: HuggingFaceGenerationAdapter, how: str
) -> None:
    model = drafted if how == "generator" else both.ours
    kept = Kept()
    extra = {"assistant_model": both.draft} if how == "assistant" else {}
    made = model.generate(ONE, attention_mask=torch.ones_like(ONE), streamer=kept, **NEW, **extra)
    assert kept.tokens == made[0].tolist() and kept.ended


def test_processors_over_several_rows_run_without_speculation(
    both: Both, drafted: HuggingFaceGenerationAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        made = drafted.generate(PADDED, attention_mask=MASK, logits_processor=[Favour()], **NEW)
    assert torch.equal(made, expected(both, PADDED, logits_processor=[Favour()]))
    assert "without speculation: a logits processor may look at several rows" in caplog.text
    beams = drafted.generate(PADDED, attention_mask=MASK, num_beams=2, **NEW)
    assert torch.equal(beams, expected(both, PADDED, num_beams=2))


def test_unsupported_assistants_are_rejected(both: Both) -> None:
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ONE), **NEW}
    with pytest.raises(ConfigurationError, match="load the folder with AutoDecoder"):
        both.ours.generate(ONE, assistant_model=both.theirs, **asked)
    with pytest.raises(ConfigurationError, match="assistant_early_exit"):
        both.ours.generate(ONE, assistant_early_exit=1, **asked)
    with pytest.raises(ConfigurationError, match="draft tokens per round"):
        both.ours.generate(ONE, prompt_lookup_num_tokens=500, **asked)
    with pytest.raises(ConfigurationError, match="one prompt at a time"):
        both.ours.generate(PADDED, assistant_model=both.draft, **{**asked, "attention_mask": MASK}, streamer=Kept())


def test_pipelines_generate_with_the_adapter(both: Both, drafted: HuggingFaceGenerationAdapter) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(both.folder / "tokenizer.json"), unk_token="<unk>", pad_token="<unk>"
    )
    prompts = ["w5 w9 w13", "w7 w3"]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    theirs = pipeline("text-generation", model=both.theirs, tokenizer=tokenizer, device="cpu")
    for model in (both.ours, drafted):
        ours = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        assert ours(prompts, **asked) == theirs(prompts, **asked)
        assert ours(prompts, batch_size=2, **asked) == theirs(prompts, batch_size=2, **asked)
    assistant = HuggingFaceGenerationAdapter(both.draft)
    ours = pipeline("text-generation", model=both.ours, tokenizer=tokenizer, assistant_model=assistant, device="cpu")
    assert ours(prompts[0], **asked) == theirs(prompts[0], **asked)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    text = ours(prompts[0], streamer=streamer, return_full_text=False, **asked)[0]["generated_text"]
    assert "".join(streamer).split() == text.split()
