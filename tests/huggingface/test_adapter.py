"""`HuggingFaceGenerationAdapter` compared with the same tiny weights in `transformers`: the same arguments, the same
tokens.

transformers' own tests are in its repository and not in its wheel; `test_transformers_suite.py` runs them where a
checkout is given. These run everywhere.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from paceline import AutoDecoder, HuggingFaceGenerationAdapter
from paceline.core.errors import ConfigurationError, ContextError, DecoderBusyError, PromptError
from paceline.decoder import steps
from paceline.huggingface.adapter import CACHE_FIELD
from tests.fakes_models import V
from tests.huggingface.conftest import Both

ONE = torch.tensor([[5, 9, 13, 5, 9]])
PADDED = torch.tensor([[5, 9, 13, 5, 9, 2, 7], [0, 0, 0, 7, 3, 2, 11]])
MASK = (PADDED != 0).long()


FORGETS_PADDING = ("prefill_chunk_size",) if transformers.__version__.startswith("4.") else ()
"""Options with which models of `transformers` 4 take padding for text; they change no token."""


def assert_same(both: Both, ids: Tensor, **asked: Any) -> Tensor:
    """The same call of both, from the same state of PyTorch's generator."""
    asked = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": 12, **asked}
    made = []
    for model, left_out in ((both.theirs, FORGETS_PADDING), (both.ours, ())):
        torch.manual_seed(7)
        made.append(model.generate(ids, **{name: asked[name] for name in asked if name not in left_out}))
    expected, result = made
    assert torch.equal(result, expected)
    return expected


GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampling": SAMPLED,
    "min-p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "beams": {**GREEDY, "num_beams": 3},
    "several beams returned": {**GREEDY, "num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampled beams": {"do_sample": True, "num_beams": 2, "early_stopping": True},
    "several samples": {**SAMPLED, "num_return_sequences": 2},
    "penalties": {**GREEDY, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "bad words": {**GREEDY, "bad_words_ids": [[token] for token in range(0, V, 3)]},
    "a late end": {**GREEDY, "eos_token_id": list(range(1, V, 2)), "min_new_tokens": 5},
    "without a cache": {**GREEDY, "use_cache": False},
    "a prompt in chunks": {**GREEDY, "prefill_chunk_size": 3},
    "a forced end": {**GREEDY, "num_beams": 2, "forced_eos_token_id": 4, "eos_token_id": 4},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ids", [ONE, PADDED], ids=["one prompt", "padded prompts"])
def test_tokens_equal_those_of_transformers(both: Both, ids: Tensor, name: str) -> None:
    asked = CALLS[name]
    assert_same(both, ids, attention_mask=(ids != 0).long(), **asked)


def test_finished_rows_are_padded(both: Both) -> None:
    free = assert_same(both, PADDED, attention_mask=MASK, **GREEDY)
    end = int(free[1, PADDED.shape[1] + 2])
    made = assert_same(both, PADDED, attention_mask=MASK, eos_token_id=end, **GREEDY)
    assert made[1, -1] == 0 and made[0, -1] != 0


@pytest.mark.parametrize("name", ["greedy", "sampling", "beams"])
def test_scores_and_logits_equal_those_of_transformers(both: Both, name: str) -> None:
    asked: dict[str, Any] = {
        **CALLS[name], "attention_mask": MASK, "pad_token_id": 0, "max_new_tokens": 6,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    results = []
    for model in (both.theirs, both.ours):
        torch.manual_seed(3)
        results.append(model.generate(PADDED, **asked))
    expected, result = results
    assert type(result) is type(expected)
    assert torch.equal(result.sequences, expected.sequences)
    for kind in ("scores", "logits"):
        ours, theirs = torch.stack(getattr(result, kind)), torch.stack(getattr(expected, kind))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    if name == "beams":
        torch.testing.assert_close(result.sequences_scores, expected.sequences_scores)
        assert torch.equal(result.beam_indices, expected.beam_indices)
    scored = both.ours.compute_transition_scores(
        result.sequences, result.scores, getattr(result, "beam_indices", None), normalize_logits=True
    )
    assert scored.shape == (2, 6)


def test_generation_without_a_prompt_starts_with_the_bos_id(both: Both) -> None:
    made = [
        model.generate(bos_token_id=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for model in (both.theirs, both.ours)
    ]
    assert torch.equal(*made) and made[0][0, 0] == 3


def test_a_generation_config_is_followed(both: Both) -> None:
    config = GenerationConfig(max_new_tokens=9, do_sample=True, top_k=5, temperature=1.3, pad_token_id=0)
    made = []
    for model in (both.theirs, both.ours):
        torch.manual_seed(1)
        made.append(model.generate(ONE, attention_mask=torch.ones_like(ONE), generation_config=config))
    assert torch.equal(*made)
    assert both.ours.generation_config.eos_token_id == both.theirs.generation_config.eos_token_id


class Favour(LogitsProcessor):
    """Prefers a token that follows from the text of each row, padding included."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids.sum(1, keepdim=True) + torch.arange(len(input_ids)).unsqueeze(1)) % V
        return scores.scatter_add(1, favoured, torch.full_like(scores[:, :1], 6.0))


class EndOn(StoppingCriteria):
    """Ends a row with a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("beams", [1, 3])
def test_processors_and_criteria_see_what_transformers_shows_them(both: Both, beams: int) -> None:
    processors = LogitsProcessorList([Favour()])
    free = assert_same(both, PADDED, attention_mask=MASK, logits_processor=processors, num_beams=beams, **GREEDY)
    assert not torch.equal(free, assert_same(both, PADDED, attention_mask=MASK, num_beams=beams, **GREEDY))
    criteria = StoppingCriteriaList([EndOn(int(free[0, PADDED.shape[1] + 3]))])
    asked = {"logits_processor": processors, "stopping_criteria": criteria, "eos_token_id": V - 1}
    assert_same(both, PADDED, attention_mask=MASK, num_beams=beams, **asked, **GREEDY)


def test_prefix_allowed_tokens_are_requested_by_row(both: Both) -> None:
    def allowed(row: int, _ids: Tensor) -> list[int]:
        return list(range(row, V, 2))

    made = assert_same(both, PADDED, attention_mask=MASK, prefix_allowed_tokens_fn=allowed, **GREEDY)
    assert all(int(token) % 2 == row for row in (0, 1) for token in made[row, PADDED.shape[1] :])


def test_forward_returns_the_logits_of_every_token(both: Both) -> None:
    """Left, right and inner padding; a text longer than a window; and a text that is continued."""
    inner = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 0]])
    for mask in (MASK, torch.ones_like(MASK), inner):
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            expected = both.theirs(PADDED, attention_mask=mask, position_ids=positions).logits
        made = both.ours(PADDED, attention_mask=mask).logits
        torch.testing.assert_close(made[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    first = both.ours(PADDED[:, :4], attention_mask=MASK[:, :4], logits_to_keep=1)
    rest = both.ours(PADDED[:, 4:], attention_mask=MASK, cache=first[CACHE_FIELD])
    with torch.no_grad():
        expected = both.theirs(PADDED, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(rest.logits, expected[:, 4:], atol=1e-4, rtol=1e-4)
    assert isinstance(both.ours(ONE, return_dict=False), tuple)


def test_a_cache_is_cropped_and_reordered(both: Both) -> None:
    out = both.ours(PADDED, attention_mask=MASK)
    cache = out[CACHE_FIELD]
    cache.crop(-2)
    assert cache.get_seq_length() == 5 and cache.batch_size == 2
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    mask = MASK[[1, 0]]
    again = both.ours(PADDED[[1, 0], 5:], attention_mask=mask[:, 5:], cache=cache).logits
    torch.testing.assert_close(again, out.logits[[1, 0], 5:], atol=1e-4, rtol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ConfigurationError, match="crop"):
        cache.crop(3)


def test_a_prompt_with_many_outputs_is_prefilled_once(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = steps.prefill

    def counted(decoder: Any, slot: int, *arguments: Any, **keywords: Any) -> Any:
        read.append(slot)
        return original(decoder, slot, *arguments, **keywords)

    monkeypatch.setattr(steps, "prefill", counted)
    assert_same(both, PADDED, attention_mask=MASK, num_beams=2, **GREEDY)
    assert read == [0, 2]


def test_a_decoders_slots_serve_one_generation_at_a_time(both: Both) -> None:
    out = both.ours(ONE)
    cache = out[CACHE_FIELD]
    both.decoder.sample([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(DecoderBusyError, match="another generation has used"):
        both.ours(ONE, cache=cache)
    stream = both.decoder.stream([[1, 2, 3]], max_new_tokens=4)
    with pytest.raises(DecoderBusyError, match="in the middle"):
        both.ours(ONE)
    stream.close()
    del stream
    gc.collect()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a loop as a function": ({"custom_generate": lambda **_: None}, "custom_generate"),
    "a loop as a repository": ({"custom_generate": "owner/name", "trust_remote_code": True}, "custom_generate"),
    "group beams": (
        {"num_beams": 4, "num_beam_groups": 2, "trust_remote_code": True},
        "code of a repository, which is not executed",
    ),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 2, 24)}, "inputs_embeds"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale"),
    "a negative prompt": ({"negative_prompt_ids": ONE}, "negative_prompt_ids"),
    "a static cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "a paged cache": ({"cache_implementation": "paged"}, "cache_implementation"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "right padding": (
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "attention_mask: expected padding on the left, got a row",
    ),
    "a strange cache": ({"past_key_values": object()}, "past_key_values: expected a cache that this model returned"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # transformers warns of some of these itself
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_generate_arguments_are_rejected_by_name(both: Both, name: str) -> None:
    asked, words = REFUSED[name]
    with pytest.raises(ConfigurationError, match=words):
        both.ours.generate(None if "inputs_embeds" in asked else ONE, max_new_tokens=3, pad_token_id=0, **asked)


def test_texts_beyond_the_context_are_rejected(both: Both) -> None:
    with pytest.raises(ContextError, match="64 positions"):
        both.ours.generate(ONE, max_new_tokens=60, pad_token_id=0)
    with pytest.raises(PromptError, match="batch_size=7"):
        both.ours.generate(ONE, num_beams=7, max_new_tokens=3, pad_token_id=0)
    with pytest.raises(PromptError, match="vocabulary"):
        both.ours.generate(torch.tensor([[V]]), max_new_tokens=3, pad_token_id=0)
    with pytest.raises(ValueError, match="not used by the model"):
        both.ours.generate(ONE, max_new_tokens=3, temperatur=0.5)


def test_objects_that_are_not_decoders_are_rejected(both: Both) -> None:
    with pytest.raises(ConfigurationError, match="model: expected a decoder or generator of this package, got"):
        HuggingFaceGenerationAdapter(both.theirs)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="generate_batch"):
        both.ours.generate_batch([[1, 2]])
    with pytest.raises(ConfigurationError, match="input_ids"):
        both.ours(None)


def test_slots_are_swapped_on_a_compiled_graph(both: Both) -> None:
    decoder = AutoDecoder.from_pretrained(both.folder, batch_size=3, n_positions=64, amp="f32", backend="native")
    decoder.on_graph = lambda _event: None
    before = [one.normal_().clone() for layer in decoder.body.caches for one in layer]
    steps.reorder_slots(decoder, torch.tensor([2, 2, 0], dtype=torch.int32), rows=40)
    for old, new in zip(before, (one for layer in decoder.body.caches for one in layer), strict=True):
        assert torch.equal(new[:, :, :64], old[[2, 2, 0], :, :64])


@pytest.mark.usefixtures("two_ranks")
def test_beam_search_on_two_ranks_keeps_the_tokens(both: Both) -> None:
    decoder = AutoDecoder.from_pretrained(
        both.folder, batch_size=6, n_positions=64, context_length_estimate=[8, 16], amp="f32", backend="eager",
        tp_degree=2,
    )  # fmt: skip
    try:
        asked: dict[str, Any] = {"attention_mask": MASK, "num_beams": 3, "max_new_tokens": 12, "pad_token_id": 0}
        made = HuggingFaceGenerationAdapter(decoder).generate(PADDED, do_sample=False, **asked)
        assert torch.equal(made, both.theirs.generate(PADDED, do_sample=False, **asked))
    finally:
        decoder.close()


def test_the_adapter_is_a_transformers_model(both: Both) -> None:
    assert isinstance(both.theirs, LlamaForCausalLM)
    assert both.ours.can_generate() and both.ours.config.model_type == "llama"
    assert both.ours.device == torch.device("cpu") and both.ours.dtype == torch.float32
