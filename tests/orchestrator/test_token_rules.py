"""Token rules of a request: penalties, bias, log-probabilities, several continuations."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError, SamplingError
from paceline.core.types import TokenLogprobs
from tests.fakes import TableDecoder, table
from tests.sampled import run

V = 12
TARGET = table(V, seed=7, spread=2.0)
SETTINGS: list[dict[str, object]] = [{}, {"do_sample": True, "temperature": 1.0, "seed": 3}]


def sampled(draft: object = None, slots: int = 1, options: dict[str, object] | None = None, **asked: object) -> Any:
    made = SpeculativeGenerator(draft, TableDecoder(TARGET, slots=slots), **(options or {}))
    return run(made, [[1, 2]], **{"eos_token_id": [], "max_new_tokens": 24, **asked})


def by_hand(setting: dict[str, object], presence: float, frequency: float, bias: dict[int, float]) -> list[int]:
    """The same text by one processor of Hugging Face's interface."""

    def penalised(ids: Tensor, scores: Tensor) -> Tensor:
        for token, count in Counter(ids[0, 2:].tolist()).items():
            scores[0, token] -= presence + frequency * count
        for token, value in bias.items():
            scores[0, token] += value
        return scores

    return sampled(logits_processor=[penalised], **setting).sequences[0].tolist()


@pytest.mark.parametrize("setting", SETTINGS, ids=["greedy", "drawn"])
def test_penalties_and_bias_equal_the_api_definition(setting: dict[str, object]) -> None:
    bias = {3: 1.5, 5: -100.0}
    asked = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": bias, **setting}
    text = sampled(**asked).sequences[0].tolist()
    assert text == by_hand(setting, 0.7, 0.4, bias)
    assert text != sampled(**setting).sequences[0].tolist()
    assert 5 not in text[2:]


@pytest.mark.parametrize("setting", SETTINGS, ids=["greedy", "drawn"])
def test_logprobs_are_the_models_before_any_processing(setting: dict[str, object]) -> None:
    done = sampled("ngram", options={"k": 3}, logprobs=4, logit_bias={5: -100.0}, output_scores=True, **setting)
    text, said = done.sequences[0].tolist(), done.token_logprobs[0]
    assert len(said) == len(text) - 2
    for at, one in enumerate(said, start=2):
        model = TARGET[text[at - 2], text[at - 1]].log_softmax(-1)
        assert isinstance(one, TokenLogprobs) and one.token == text[at]
        assert one.logprob == pytest.approx(float(model[text[at]]), abs=1e-5)
        assert one.rank == 1 + int((model > model[text[at]]).sum())
        assert [token for token, _ in one.top] == model.topk(4).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(model.topk(4).values.tolist(), abs=1e-5)
    plain = sampled("ngram", options={"k": 3}, logit_bias={5: -100.0}, **setting)
    assert plain.sequences.tolist() == done.sequences.tolist() and plain.token_logprobs is None


def test_min_tokens_delays_the_eos_id_and_ignore_eos_ignores_it() -> None:
    free = sampled(max_new_tokens=24, ignore_eos=True, eos_token_id=list(range(V)))
    assert free.lengths == [26]
    eos = free.sequences[0].tolist()[4]
    short, later = sampled(eos_token_id=eos), sampled(eos_token_id=eos, min_tokens=8)
    assert short.lengths[0] <= 5 and later.lengths[0] >= 2 + 9
    assert eos not in later.sequences[0].tolist()[2:10]


@pytest.mark.parametrize("drawn", [False, True])
def test_min_tokens_suppresses_an_eos_id_inside_a_block(drawn: bool) -> None:
    """The draft proposes the end everywhere; openvino-genai 2026.4.1.0 fails in this case."""
    asked = {"do_sample": drawn, "eos_token_id": 7, "min_tokens": 6}
    eager = TARGET.clone()
    eager[..., 7] += 4
    text = sampled(**asked).sequences.tolist()
    for draft in (TARGET, eager):
        assert sampled(TableDecoder(draft), options={"k": 4}, **asked).sequences.tolist() == text
    assert 7 not in text[0][2:8]


def test_n_continuations_equal_n_rows_with_the_same_prompt() -> None:
    setting = {"do_sample": True, "seed": 5, "max_new_tokens": 8, "eos_token_id": []}
    made = SpeculativeGenerator("ngram", TableDecoder(TARGET, slots=2), k=2)
    several = made.sample([[1, 2], [3, 4]], n=3, **setting)  # type: ignore[call-overload]
    rows = made.sample([[1, 2]] * 3 + [[3, 4]] * 3, **setting)  # type: ignore[call-overload]
    assert torch.equal(several, rows) and len({tuple(row) for row in several.tolist()}) == 6


def test_a_rule_on_the_device_rejects_logprobs() -> None:
    made = SpeculativeGenerator("ngram", TableDecoder(TARGET), acceptor="typical", k=2)
    with pytest.raises(ConfigurationError, match="'typical' decides on the device"):
        made.sample([[1, 2]], logprobs=0)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("length", [2, 4])
def test_a_dead_end_is_reported_at_the_start_and_later(length: int, do_sample: bool) -> None:
    def cut(ids: Tensor, scores: Tensor) -> Tensor:
        return scores if ids.shape[1] < length else scores - math.inf

    one = SpeculativeGenerator("ngram", TableDecoder(TARGET), k=2)
    with pytest.raises(SamplingError, match=f"expected at least one allowed token after {length} tokens"):
        one.sample([[1, 2]], logits_processor=[cut], eos_token_id=[], do_sample=do_sample)  # type: ignore[list-item]
    one.sample([[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_the_grammar_mask_after_a_forbidden_draft_is_not_a_dead_end(acceptor: str) -> None:
    def never_nine(ids: Tensor, scores: Tensor) -> Tensor:
        return scores - math.inf if 9 in ids else scores.index_fill(1, torch.tensor([9]), -math.inf)

    made = SpeculativeGenerator(FunctionDrafter(lambda _ids: [9, 9], 2), TableDecoder(TARGET), acceptor=acceptor)
    ids = made.sample([[1, 2]], max_new_tokens=4, eos_token_id=[], logits_processor=[never_nine])  # type: ignore[list-item]
    assert isinstance(ids, Tensor) and ids.shape == (1, 6) and 9 not in ids
