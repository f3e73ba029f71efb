"""Rejections before any work starts, and the remedies that their messages name; padding and masks."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch

from paceline import FunctionDrafter, NgramDrafter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError, PairingError, PromptError, RequestError, SamplingError
from paceline.core.types import DraftShape
from paceline.engine.sampling_params import SamplingParams
from tests.fakes import TableDecoder, table
from tests.fakes_text import Pieces
from tests.sampled import run

V = 10
TARGET = table(V, seed=7, spread=2.0)


def generator(slots: int = 1) -> SpeculativeGenerator:
    return SpeculativeGenerator("ngram", TableDecoder(TARGET, slots=slots, kv_buckets=(16,)), k=2)


def _plainly(given: object) -> str:
    """A value without its address, which is another one in every process."""
    return re.sub(r" at 0x\w+", "", str(given))


PROMPT_ERRORS = [
    ([], "or a list of lists of ids, got no prompt; give at least one"),
    ([[]], "got an empty prompt 0"),
    ([[1], []], "got an empty prompt 1"),
    ([[1, V]], f"expected ids of the vocabulary of {V}, got {V} in prompt 0"),
    ([[1], [-1]], "got -1 in prompt 1"),
    ([1, 2], "turn text into ids first"),
    (["text"], "turn text into ids first"),
    ("text", "turn text into ids first"),
    ([[1.5]], "expected integers, got 1.5 in prompt 0"),
    ([[1], [True]], "expected integers, got True in prompt 1"),
    ([["text"]], "expected integers, got 'text' in prompt 0"),
    (None, "input_ids: expected a LongTensor [B, S] or a list of lists of ids, got NoneType None"),
    (7, "got int 7"),
    ({"input_ids": [[1]]}, "pass encoding['input_ids']"),
    (iter([[1]]), "expected a LongTensor"),
    (b"text", "turn text into ids first"),
    (torch.tensor(1), "expected an integer tensor [B, S]"),
    (torch.tensor([1, 2]), "expected an integer tensor [B, S]"),
    (torch.tensor([[1.0]]), "torch.float32"),
    (torch.tensor([[True]]), "torch.bool"),
    (torch.zeros(1, 0, dtype=torch.int64), "empty prompt 0"),
    ([list(range(8)) * 2], "a prompt shorter than 16 positions"),
]


@pytest.mark.parametrize(("prompts", "message"), PROMPT_ERRORS, ids=_plainly)
def test_bad_prompts_are_rejected(prompts: object, message: str) -> None:
    one = generator()
    with pytest.raises(PromptError) as caught:
        one.sample(prompts)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert isinstance(caught.value, RequestError)
    assert one.target.body.forwards == 0  # type: ignore[attr-defined]


SAMPLING_ERRORS = [
    ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
    ({"temperature": -1.0}, "temperature: expected a finite number of at least 0, got -1.0; 0 is greedy"),
    ({"temperature": float("nan")}, "temperature: expected a finite number of at least 0, got"),
    ({"do_sample": "false"}, "do_sample: expected True or False, got str 'false'"),
    ({"output_scores": 1}, "output_scores: expected True or False, got int 1"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty: expected a positive number, got nan"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty: expected a positive number, got inf"),
    ({"temperature": 10**400, "do_sample": True}, "temperature: expected a number"),
    ({"repetition_penalty": 10**400}, "repetition_penalty: expected a number"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"min_p": 2.0}, "min_p"),
    ({"seed": 1 << 64}, "seed: expected an integer of at most 64 bits"),
    ({"seed": [1, 2]}, "seed: expected 1 entries, got 2"),
    ({"stop_strings": "x"}, "expected a tokenizer"),
    (
        {"stop_strings": ["x", ""], "tokenizer": Pieces([b"x"])},
        "stop_strings: expected strings that are not empty, got an",
    ),
    ({"eos_token_id": -1}, f"eos_token_id: expected ids of the vocabulary of {V}, got -1"),
    ({"eos_token_id": [1, 10**6]}, "got 1000000; give ids"),
    ({"repetition_penalty": 0.0}, "repetition_penalty: expected a positive number, got"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: expected a positive number, got"),
    ({"sequence_length": "9"}, "sequence_length: expected an integer or None, got str '9'"),
    ({"max_new_tokens": 2.0}, "max_new_tokens: expected an integer or None, got float 2.0"),
    ({"max_new_tokens": True}, "max_new_tokens: expected an integer or None, got bool True"),
    ({"top_k": 1.5}, "top_k: expected an integer"),
    ({"no_repeat_ngram_size": "2"}, "no_repeat_ngram_size: expected an integer"),
    ({"temperature": None}, "temperature: expected a number, got NoneType"),
    ({"temperature": "hot"}, "temperature: expected a number, got str 'hot'"),
    ({"top_p": [0.9]}, "top_p: expected a number or None, got list [0.9]"),
    ({"min_p": "0"}, "min_p: expected a number"),
    ({"repetition_penalty": "1"}, "repetition_penalty: expected a number"),
    ({"seed": "1"}, "seed: expected an integer or a list of integers or None, got str '1'"),
    ({"seed": [1.5]}, "seed: expected an integer or a list"),
    ({"eos_token_id": "end"}, "eos_token_id: expected an integer or a list of integers or None, got str 'end'"),
    ({"eos_token_id": [1, None]}, "eos_token_id: expected an integer or a list"),
    ({"eos_token_id": torch.tensor([1])}, "got a tensor of shape [1]"),
    ({"use_speculation": None}, "use_speculation: expected True or False or a list of truth values, got NoneType None"),
    ({"use_speculation": [1]}, "use_speculation: expected True or False or a list of truth values, got list [1]"),
    ({"stop_strings": [3]}, "stop_strings: expected a string or a list of strings or None, got list [3]"),
    ({"stop_strings": "x", "tokenizer": "gpt2"}, "expected a tokenizer"),
    ({"stopping_criteria_list": len}, "stopping_criteria_list: expected a list of callables"),
    ({"logits_processor": [3]}, "logits_processor: expected a list of callables or None, got list [3]"),
    ({"pad_token_id": "pad"}, "pad_token_id: expected an integer or None, got str 'pad'"),
    ({"presence_penalty": 3}, "presence_penalty: expected a number from -2 to 2, got 3"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty: expected a number from"),
    ({"logprobs": 21}, "logprobs: expected a number from 0 to 20, got 21"),
    ({"logprobs": True}, "logprobs: expected an integer or None"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: expected a number from 0 to 20, got 21"),
    ({"n": 0}, "n: expected a number from 1"),
    ({"min_tokens": -1}, "min_tokens: expected a number of at least 0"),
    ({"logit_bias": {3: 101}}, "logit_bias: expected values from"),
    ({"logit_bias": {"3": 1}}, "logit_bias: expected a mapping of ids to numbers"),
    ({"logit_bias": {V: 1}}, f"logit_bias: expected ids of the vocabulary of {V}, got {V}"),
    ({"structured_outputs": {"type": "object"}}, "structured_outputs: expected a StructuredOutput"),
    ({"prediction": 3}, "prediction: expected a string or a list of integers"),
    ({"use_speculation": [True, False]}, "use_speculation: expected 1 entries, got 2"),
    ({"streamer": len}, "streamer: expected an object with put(ids) and end(), got a builtin_function_or_method"),
]


@pytest.mark.parametrize(("asked", "message"), SAMPLING_ERRORS, ids=_plainly)
def test_bad_values_are_rejected(asked: dict[str, object], message: str) -> None:
    one = generator()
    with pytest.raises(SamplingError) as caught:
        one.sample([[1, 2]], **asked)
    assert message in str(caught.value)
    assert one.target.body.forwards == 0  # type: ignore[attr-defined]


def test_values_accepted_by_http_are_accepted_in_python() -> None:
    """A seed that is drawn for each call, and -1 for no top-k."""
    one, drawn = generator(), set()
    for _ in range(3):
        params = SamplingParams(seed=None)
        assert isinstance(params.seed, int) and params.sampling_of(0) == params.sampling_of(0)
        drawn.add(params.seed)
    assert len(drawn) == 3
    asked = {"do_sample": True, "seed": 3, "max_new_tokens": 6}
    plain = one.sample([[1, 2]], **asked).tolist()  # type: ignore[arg-type]
    assert one.sample([[1, 2]], top_k=-1, **asked).tolist() == plain  # type: ignore[arg-type]


def test_lengths_beyond_the_positions_are_rejected() -> None:
    with pytest.raises(PromptError, match="sequence_length: expected at most 16"):
        generator().sample([[1]], 17)
    with pytest.raises(PromptError, match="a prompt shorter than 2 positions"):
        generator().sample([[1, 2]], 2)


def test_numpy_numbers_are_accepted() -> None:
    asked = {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "do_sample": True, "seed": np.int32(4)}
    found = generator().sample([[np.int64(1), 2]], eos_token_id=np.int64(9), **asked)  # type: ignore[arg-type]
    wanted = generator().sample([[1, 2]], eos_token_id=9, max_new_tokens=3, temperature=0.5, do_sample=True, seed=4)
    assert torch.equal(found, wanted)  # type: ignore[arg-type]


NO_MASK = r"attention_mask: expected a tensor \[B, S\] like input_ids, got"
OTHER_SHAPE = "attention_mask: expected the shape of input_ids, got"
MASK_ERRORS = [
    *((mask, NO_MASK) for mask in (torch.tensor([1, 1, 1]), [[1, 1, 1]], torch.ones(1, 1, 3), "111")),
    *((mask, OTHER_SHAPE) for mask in (torch.tensor([[1, 1]]), torch.ones(2, 3))),
    (torch.tensor([[1, 0, 1]]), "attention_mask: expected padding only at the ends, got a"),
    (torch.tensor([[0, 0, 0]]), "empty prompt 0"),
]


@pytest.mark.parametrize(("mask", "message"), MASK_ERRORS, ids=_plainly)
def test_wrong_masks_are_rejected(mask: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        generator().sample(torch.tensor([[1, 2, 3]]), attention_mask=mask)  # type: ignore[arg-type]


def test_padding_on_either_side_is_left_out() -> None:
    padded = torch.tensor([[1, 2, 3], [0, 4, 5], [6, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0]])
    asked = {"max_new_tokens": 4, "pad_token_id": 9}
    got = run(generator(2), padded, attention_mask=mask, **asked)  # type: ignore[arg-type]
    assert torch.equal(got.sequences, run(generator(2), [[1, 2, 3], [4, 5], [6]], **asked).sequences)
    assert got.lengths == [7, 6, 5] and got.sequences[2, 5:].tolist() == [9, 9]
    assert got.sequences.dtype == torch.int64


@pytest.mark.parametrize(
    ("eos", "pad", "wanted"), [((), None, 0), ((3, 4), None, 3), ((3,), 5, 5)], ids=["zero", "eos", "pad"]
)
def test_rows_are_padded_with_the_checkpoint_s_pad_id(eos: tuple[int, ...], pad: int | None, wanted: int) -> None:
    decoder = TableDecoder(TARGET, slots=2, kv_buckets=(16,), eos=eos, pad=pad)
    got = decoder.sample([[1, 2, 3], [4]], max_new_tokens=1)
    assert got[1, 2:].tolist() == [wanted, wanted]  # type: ignore[union-attr]


class Old:
    """A drafter as they were written before there was a base class."""

    draft_shape, reads, max_positions = DraftShape.chain(2), None, None

    def propose(self, *given: object) -> None: ...


CONFIGURATION_ERRORS = [  # what is wrong in a draft's configuration: test_config.py
    ({"acceptor": [1]}, "or a rule's object, got [1]"),
    ({"target": "models/llama"}, "target: expected a decoder, got a str; load one with AutoDecoder.from_pretrained"),
    ({"draft": Old()}, "got Old, which only has its methods; derive it"),
    ({"draft": TableDecoder(TARGET, slots=2)}, "batch_size: expected 1 for the draft, as for the target, got 2"),
    ({"k": 128}, "got 129"),
    ({"verify_width": "5"}, "verify_width: expected an integer or None, got '5'"),
    ({"k": 2, "verify_width": 2}, "verify_width: expected at least 2 draft tokens and one more, got 2"),
    ({"draft": None, "k": 0, "verify_width": 0}, "verify_width: expected at least 0 draft tokens and one more, got 0"),
]


@pytest.mark.parametrize(("options", "message"), CONFIGURATION_ERRORS, ids=_plainly)
def test_impossible_generators_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises((ConfigurationError, PairingError)) as caught:
        SpeculativeGenerator(**{"draft": "ngram", "target": TableDecoder(TARGET), **options})  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_impossible_drafters_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="expected a function from ids to ids, got a str"):
        FunctionDrafter("again", 2)  # type: ignore[arg-type]
    for make, k in ((lambda k: FunctionDrafter(list, k), -1), (NgramDrafter, -2), (NgramDrafter, 1.5)):
        with pytest.raises(ConfigurationError, match=f"draft tokens per round, got {k}"):
            make(k)  # type: ignore[no-untyped-call]


WRONG_SCORES = [
    (lambda _ids, _scores: None, "expected scores [1, 10], got a NoneType"),
    (lambda _ids, scores: scores[:, :5], "got a tensor of shape [1, 5]"),
    (lambda _ids, scores: scores[0], "got a tensor of shape [10]"),
    (lambda _ids, scores: scores * float("nan"), "got NaN after 2 tokens"),
]


@pytest.mark.parametrize(("processor", "message"), WRONG_SCORES, ids=["nothing", "some", "flat", "NaN"])
def test_invalid_processor_results_are_rejected(processor: object, message: str) -> None:
    one = generator()
    with pytest.raises(SamplingError) as caught:
        one.sample([[1, 2]], logits_processor=[processor])  # type: ignore[list-item]
    assert message in str(caught.value)
    one.sample([[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize(
    "setting", [{}, {"do_sample": True, "temperature": 1.3, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_a_processor_may_force_a_token_by_infinity(setting: dict[str, object]) -> None:
    def force(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([7]), float("inf"))

    made = run(generator(), [[1, 2]], max_new_tokens=3, logits_processor=[force], output_scores=True, **setting)
    assert made.sequences.tolist() == [[1, 2, 7, 7, 7]] and made.logprobs == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("fused", "said"), [(True, True), (None, False)])
def test_an_explicit_option_without_effect_is_logged(
    caplog: pytest.LogCaptureFixture, fused: bool | None, said: bool
) -> None:
    draft = TableDecoder(TARGET)
    made = SpeculativeGenerator(draft, TableDecoder(TARGET), k=2, fused=fused)
    with caplog.at_level(logging.WARNING, "paceline"):
        made.sample([[1, 2]], max_new_tokens=3, output_scores=True)
    assert ("two graphs" in caplog.text) == said


def test_a_numpy_draft_length_is_accepted() -> None:
    made = SpeculativeGenerator("ngram", TableDecoder(TARGET), k=np.int64(3))  # type: ignore[arg-type]
    assert made.drafter.draft_shape.num_draft_tokens == 3


def test_sampling_values_without_do_sample_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """transformers-neuronx samples in this case; Paceline is greedy."""
    made = generator()
    for keywords in ({"top_k": 50, "do_sample": False}, {"top_k": 50, "do_sample": True, "seed": 1}, {}):
        made.sample([[1, 2]], max_new_tokens=2, **keywords)
    assert "without do_sample=True" not in caplog.text
    for _ in range(2):
        made.sample([[1, 2]], max_new_tokens=2, top_k=50)
    assert caplog.text.count("top_k without do_sample=True: decoding is greedy") == 1
