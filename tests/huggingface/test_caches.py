"""Caches that calls give back and take: texts that continue, copies of a cache, and what an assisted call leaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from paceline import HuggingFaceGenerationAdapter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError, DecoderBusyError
from paceline.decoder import steps
from paceline.huggingface.adapter import CACHE_FIELD, check_options
from tests.huggingface.conftest import Both
from tests.huggingface.test_adapter import MASK, ONE, PADDED

NEW: dict[str, Any] = {"pad_token_id": 0, "return_dict_in_generate": True}


def ones(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids)


def test_cached_tokens_are_not_prefilled_again(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    head = both.ours.generate(PADDED, attention_mask=MASK, max_new_tokens=4, **NEW)
    read: list[int] = []
    original = steps.window

    def counted(decoder: Any, tokens: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        read.append(tokens.shape[1])
        return original(decoder, tokens, *arguments, **keywords)

    monkeypatch.setattr(steps, "window", counted)
    monkeypatch.setattr(steps, "prefill", None)  # no prompt is left to read
    mask = torch.nn.functional.pad(MASK, (0, 4), value=1)
    given = {CACHE_FIELD: head[CACHE_FIELD], "attention_mask": mask, "max_new_tokens": 5, **NEW}
    made = both.ours.generate(head.sequences, **given).sequences
    assert torch.equal(made, both.theirs.generate(PADDED, attention_mask=MASK, max_new_tokens=9, **NEW).sequences)
    assert read == [1] * 5


@pytest.mark.parametrize("speculating", [False, True])
def test_generation_continues_from_a_cache_and_new_tokens(both: Both, speculating: bool) -> None:
    model = HuggingFaceGenerationAdapter(SpeculativeGenerator(both.draft, both.decoder)) if speculating else both.ours
    whole = both.theirs.generate(ONE, attention_mask=ones(ONE), max_new_tokens=8, **NEW).sequences
    head = model.generate(ONE, attention_mask=ones(ONE), max_new_tokens=3, **NEW)
    given = {CACHE_FIELD: head[CACHE_FIELD], "attention_mask": ones(head.sequences), "max_new_tokens": 5, **NEW}
    made = model.generate(head.sequences[:, -1:], **given).sequences
    assert torch.equal(made, whole[:, -6:])


@pytest.mark.parametrize("ids", [ONE, PADDED[1:]], ids=["without padding", "padded"])
def test_an_assisted_call_returns_its_cache(both: Both, ids: torch.Tensor) -> None:
    mask = (ids != 0).long()
    head = both.ours.generate(ids, attention_mask=mask, max_new_tokens=6, assistant_model=both.draft, **NEW)
    cache = head[CACHE_FIELD]
    assert (cache.batch_size, cache.get_seq_length()) == (1, ids.shape[1] + 5)
    mask = torch.nn.functional.pad(mask, (0, 6), value=1)
    logits = both.ours(head.sequences[:, -1:], attention_mask=mask, **{CACHE_FIELD: cache}).logits
    again = both.theirs(head.sequences, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(logits, again[:, -1:], atol=1e-4, rtol=1e-4)


def test_an_assisted_call_with_only_new_tokens_is_rejected(both: Both) -> None:
    head = both.ours.generate(ONE, attention_mask=ones(ONE), max_new_tokens=3, **NEW)
    given = {CACHE_FIELD: head[CACHE_FIELD], "attention_mask": ones(head.sequences), "max_new_tokens": 5, **NEW}
    with pytest.raises(ConfigurationError, match="all of it"):
        both.ours.generate(head.sequences[:, -1:], assistant_model=both.draft, **given)


def test_copies_of_a_cache_continue_one_prefill(both: Both) -> None:
    prompt = both.ours(PADDED[:, :4], attention_mask=MASK[:, :4])[CACHE_FIELD]
    for ends in ([[5, 9], [3, 2]], [[7, 7], [8, 1]]):
        ids = torch.cat((PADDED[:, :4], torch.tensor(ends)), 1)
        asked: dict[str, Any] = {"attention_mask": MASK[:, :6], "max_new_tokens": 6, "pad_token_id": 0}
        made = both.ours.generate(ids, **{CACHE_FIELD: copy.deepcopy(prompt)}, **asked)
        assert torch.equal(made, both.theirs.generate(ids, **asked))
    rest = both.ours(PADDED[:, 4:], attention_mask=MASK, **{CACHE_FIELD: prompt}).logits
    with torch.no_grad():
        expected = both.theirs(PADDED, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(rest, expected[:, 4:], atol=1e-4, rtol=1e-4)
    both.decoder.sample([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(DecoderBusyError, match="another generation has used"):
        copy.deepcopy(prompt)  # it has gone on since it was copied, and then lost its slots


def test_dynamic_full_cache_implementation_is_accepted() -> None:
    """Only some versions know it, and `generate` of the others refuses it before it comes to us."""
    check_options({"cache_implementation": "dynamic_full"})
    with pytest.raises(ConfigurationError, match="static"):
        check_options({"cache_implementation": "static"})


def test_an_assistants_configuration_sets_the_draft_length(both: Both) -> None:
    assistant = HuggingFaceGenerationAdapter(both.draft)
    asked: dict[str, Any] = {"attention_mask": ones(ONE), "max_new_tokens": 12, "pad_token_id": 0}
    drafted = []
    for own, of_the_call in ((1, {}), (3, {}), (3, {"num_assistant_tokens": 1})):
        assistant.generation_config.num_assistant_tokens = own
        both.ours.generate(ONE, assistant_model=assistant, **asked, **of_the_call)
        statistics = both.ours.statistics
        assert statistics is not None
        drafted.append(statistics.num_draft_tokens / statistics.num_rounds)
    assert drafted[0] <= 1 < drafted[1] and drafted[2] == drafted[0]
