"""What is refused, before any work starts, and how the message names the remedy; padding and masks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline import FunctionDrafter, NgramDrafter, SpeculativeGenerator
from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    PairingError,
    PromptError,
    RequestError,
    SamplingError,
)
from paceline.core.types import DraftShape
from paceline.engine.sampling_params import SamplingParams
from paceline.outputs import GenerationResult
from tests.fakes import TableDecoder, table
from tests.orchestrator.test_stopping import Pieces

V = 10
TARGET = table(V, seed=7, spread=2.0)


def generator(slots: int = 1) -> SpeculativeGenerator:
    return SpeculativeGenerator("ngram", TableDecoder(TARGET, slots=slots, kv_buckets=(16,)), k=2)


def _plainly(given: object) -> str:
    """A value without its address, which is another one in every process."""
    return re.sub(r" at 0x\w+", "", str(given))


PROMPT_ERRORS = [
    ([], "holds no prompt"),
    ([[]], "prompt 0 is empty"),
    ([[1], []], "prompt 1 is empty"),
    ([[1, V]], f"id {V}, outside the vocabulary of {V}"),
    ([[1], [-1]], "prompt 1 holds id -1"),
    ([1, 2], "turn text into ids first"),
    (["text"], "turn text into ids first"),
    ("text", "turn text into ids first"),
    ([[1.5]], "prompt 0 holds 1.5, which is not an integer"),
    ([[1], [True]], "prompt 1 holds True, which is not an integer"),
    ([["text"]], "prompt 0 holds 'text', which is not an integer"),
    (None, "must be a LongTensor [B, S] or a list of lists of ids, not NoneType None"),
    (7, "not int 7"),
    ({"input_ids": [[1]]}, "pass its entry: encoding['input_ids']"),
    (iter([[1]]), "must be a LongTensor"),
    (b"text", "turn text into ids first"),
    (torch.tensor(1), "must be an integer tensor [B, S]"),
    (torch.tensor([1, 2]), "must be an integer tensor [B, S]"),
    (torch.tensor([[1.0]]), "torch.float32"),
    (torch.tensor([[True]]), "torch.bool"),
    (torch.zeros(1, 0, dtype=torch.int64), "prompt 0 is empty"),
    ([list(range(8)) * 2], "leaves no room in 16 positions"),
]


@pytest.mark.parametrize(("prompts", "message"), PROMPT_ERRORS, ids=_plainly)
def test_bad_prompts_are_refused(prompts: object, message: str) -> None:
    one = generator()
    with pytest.raises(PromptError) as caught:
        one.sample(prompts)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert isinstance(caught.value, RequestError)
    assert one.target.body.forwards == 0  # type: ignore[attr-defined]


SAMPLING_ERRORS = [
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
    ({"temperature": -1.0}, "temperature must be a finite number >= 0, not -1.0; 0 is greedy"),
    ({"temperature": float("nan")}, "temperature must be a finite number"),
    ({"do_sample": "false"}, "do_sample must be True or False, not str 'false'"),
    ({"output_scores": 1}, "output_scores must be True or False, not int 1"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty must be positive, not nan"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty must be positive, not inf"),
    ({"temperature": float("nan"), "do_sample": True}, "temperature must be a finite"),
    ({"temperature": 10**400, "do_sample": True}, "temperature must be a number"),
    ({"repetition_penalty": 10**400}, "repetition_penalty must be a number"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"min_p": 2.0}, "min_p"),
    ({"seed": 1 << 64}, "seed must fit in 64 bits"),
    ({"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
    ({"stop_strings": "x"}, "need the tokenizer"),
    ({"stop_strings": ["x", ""], "tokenizer": Pieces([b"x"])}, "a stop string is empty"),
    ({"stop_strings": "", "tokenizer": Pieces([b"x"])}, "a stop string is empty"),
    ({"eos_token_id": -1}, f"eos_token_id names id -1, outside the vocabulary of {V}"),
    ({"eos_token_id": [1, 10**6]}, "eos_token_id names id 1000000, outside the vocabulary"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be positive"),
    ({"sequence_length": "9"}, "sequence_length must be an integer or None, not str '9'"),
    ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer or None, not float 2.0"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer or None, not bool True"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"no_repeat_ngram_size": "2"}, "no_repeat_ngram_size must be an integer"),
    ({"temperature": None}, "temperature must be a number, not NoneType"),
    ({"temperature": "hot"}, "temperature must be a number, not str 'hot'"),
    ({"top_p": [0.9]}, "top_p must be a number or None, not list [0.9]"),
    ({"min_p": "0"}, "min_p must be a number"),
    ({"repetition_penalty": "1"}, "repetition_penalty must be a number"),
    ({"seed": "1"}, "seed must be an integer or a list of integers or None, not str '1'"),
    ({"seed": [1.5]}, "seed must be an integer or a list"),
    ({"eos_token_id": "end"}, "eos_token_id must be an integer or a list of integers or None, not str 'end'"),
    ({"eos_token_id": [1, None]}, "eos_token_id must be an integer or a list"),
    ({"eos_token_id": torch.tensor([1])}, "not a tensor of shape [1]"),
    ({"use_speculation": None}, "use_speculation must be True or False or a list of truth values, not NoneType None"),
    ({"use_speculation": [1]}, "use_speculation must be True or False or a list of truth values, not list [1]"),
    ({"stop_strings": [3]}, "stop_strings must be a string or a list of strings or None, not list [3]"),
    ({"stop_strings": "x", "tokenizer": "gpt2"}, "need the tokenizer"),
    ({"stopping_criteria_list": len}, "stopping_criteria_list must be a list of callables"),
    ({"logits_processor": [3]}, "logits_processor must be a list of callables or None, not list [3]"),
]


@pytest.mark.parametrize(("asked", "message"), SAMPLING_ERRORS, ids=_plainly)
@pytest.mark.parametrize("call", ["sample", "stream"])
def test_bad_values_are_refused(asked: dict[str, object], message: str, call: str) -> None:
    one = generator()
    with pytest.raises(SamplingError) as caught:
        getattr(one, call)([[1, 2]], **asked)
    assert message in str(caught.value)
    assert one.target.body.forwards == 0  # type: ignore[attr-defined]


def test_what_http_takes_is_taken_in_this_process_too() -> None:
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


def test_lengths_past_the_positions_are_refused() -> None:
    with pytest.raises(PromptError, match="sequence_length=17 is more than the 16 positions"):
        generator().sample([[1]], 17)
    with pytest.raises(PromptError, match="leaves no room in 2 positions"):
        generator().sample([[1, 2]], 2)


def test_numbers_of_numpy_are_numbers() -> None:
    asked = {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "do_sample": True, "seed": np.int32(4)}
    found = generator().sample([[np.int64(1), 2]], eos_token_id=np.int64(9), **asked)  # type: ignore[arg-type]
    wanted = generator().sample([[1, 2]], eos_token_id=9, max_new_tokens=3, temperature=0.5, do_sample=True, seed=4)
    assert torch.equal(found, wanted)  # type: ignore[arg-type]


def test_a_streamer_without_its_methods_is_refused() -> None:
    with pytest.raises(SamplingError, match=r"streamer is a function without the methods put\(ids\) and end\(\)"):
        generator().sample([[1]], streamer=lambda token: token)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [torch.tensor([1, 1, 1]), [[1, 1, 1]], torch.ones(1, 1, 3), "111"], ids=_plainly)
def test_a_mask_of_another_kind_is_refused(mask: object) -> None:
    with pytest.raises(PromptError, match=r"attention_mask must be a tensor \[B, S\], as input_ids, not"):
        generator().sample(torch.tensor([[1, 2, 3]]), attention_mask=mask)  # type: ignore[arg-type]


MASK_ERRORS = [
    ([[1, 1]], "does not fit input_ids"),
    ([[1, 0, 1]], "has a hole"),
    ([[0, 0, 0]], "prompt 0 is empty"),
    ([[1, 1, 1], [1, 1, 1]], "does not fit input_ids"),
]


@pytest.mark.parametrize(("mask", "message"), MASK_ERRORS, ids=_plainly)
def test_masks_that_do_not_fit_are_refused(mask: list[list[int]], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        generator().sample(torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor(mask))


def test_padding_on_either_side_is_left_out() -> None:
    padded = torch.tensor([[1, 2, 3], [0, 4, 5], [6, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0]])
    asked = {"max_new_tokens": 4, "pad_token_id": 9, "return_dict": True}
    got = generator(2).sample(padded, attention_mask=mask, **asked)  # type: ignore[arg-type]
    wanted = generator(2).sample([[1, 2, 3], [4, 5], [6]], **asked)  # type: ignore[arg-type]
    assert torch.equal(got.sequences, wanted.sequences)  # type: ignore[union-attr]
    assert got.lengths == [7, 6, 5]  # type: ignore[union-attr]
    assert got.sequences[2, 5:].tolist() == [9, 9]  # type: ignore[union-attr]
    assert got.sequences.dtype == torch.int64  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("eos", "pad", "wanted"), [((), None, 0), ((3, 4), None, 3), ((3,), 5, 5)], ids=["zero", "eos", "pad"]
)
def test_rows_are_padded_with_the_checkpoint_s_pad_id(eos: tuple[int, ...], pad: int | None, wanted: int) -> None:
    decoder = TableDecoder(TARGET, slots=2, kv_buckets=(16,), eos=eos, pad=pad)
    got = decoder.sample([[1, 2, 3], [4]], max_new_tokens=1)
    assert got[1, 2:].tolist() == [wanted, wanted]  # type: ignore[union-attr]


CONFIGURATION_ERRORS = [
    ({"acceptor": "hope"}, "acceptor='hope' is unknown; use one of match, reject"),
    ({"acceptor": None}, "acceptor=None is unknown"),
    ({"acceptor": [1]}, "acceptor=[1] is unknown"),
    ({"target": "models/llama"}, "target is a str and no decoder; load one with AutoDecoder.from_pretrained"),
    ({"draft": "models/small/draft"}, "draft 'models/small/draft' is neither a folder nor a drafter's name"),
    ({"draft": NgramDrafter}, "draft is the class NgramDrafter; give an object of it"),
    ({"exact": "no"}, "exact='no': input should be a valid boolean"),
    ({"fused": 0}, "fused=0: input should be a valid boolean"),
    ({"confidence": 0.5}, "there is no option 'confidence'; the options are draft, k"),
    ({"confidence_threshold": "0.5"}, "confidence_threshold='0.5': input should be a valid number"),
    ({"confidence_threshold": 2.0}, "confidence_threshold=2.0: input should be less than or equal to 1"),
    ({"synthetic_acceptance": "0.5"}, "synthetic_acceptance='0.5': input should be a valid number"),
    ({"k": -1}, "k=-1 is no draft length"),
    ({"draft": "prefix"}, "draft 'prefix' is neither a folder nor a drafter's name; the names are none, ngram, suffix"),
    ({"draft": 3}, "write a name (ngram), a folder"),
    ({"k": "four"}, "k='four' is no draft length"),
    ({"k": (0, "two")}, "is no draft length"),
    ({"k": 128}, "a window of 129 rows does not fit"),
    ({"draft": None, "acceptor": "reject"}, "acceptor needs a drafter"),
    ({"draft": None, "acceptor": "typical"}, "acceptor needs a drafter"),
    ({"draft": "none", "synthetic_acceptance": 0.5}, "synthetic_acceptance needs a drafter"),
    ({"draft": None, "fused": True}, "fused needs a drafter"),
    ({"confidence_threshold": 0.9}, "confidence_threshold is an option of draft models, and draft holds none"),
    ({"vocabulary": "intersection"}, "vocabulary is an option of draft models"),
    ({"vocabulary": "anything"}, "vocabulary='anything' is unknown"),
    ({"draft": ["suffix", "ngram"], "vocabulary": "retokenize"}, "vocabulary is an option of draft models"),
]


@pytest.mark.parametrize(("options", "message"), CONFIGURATION_ERRORS, ids=_plainly)
def test_impossible_generators_are_refused(options: dict[str, object], message: str) -> None:
    asked = {"draft": "ngram", **options}
    with pytest.raises((ConfigurationError, CheckpointError)) as caught:
        SpeculativeGenerator(**{"target": TableDecoder(TARGET), **asked})  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FunctionDrafter("again", 2),
        lambda: FunctionDrafter(list, -1),
        lambda: NgramDrafter(-2),
        lambda: NgramDrafter(1.5),
    ],
)
def test_impossible_drafters_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"FunctionDrafter takes a function from ids to ids, not a str|propose -\d tokens|propose 1.5 tokens",
    ):
        make()


WRONG_SCORES = [
    (lambda _ids, _scores: None, "returned a NoneType; it must return scores [1, 10]"),
    (lambda _ids, scores: scores[:, :5], "returned a tensor of shape [1, 5]"),
    (lambda _ids, scores: scores[0], "returned a tensor of shape [10]"),
    (lambda _ids, scores: scores * float("nan"), "returned NaN for the text of 2 tokens"),
]


@pytest.mark.parametrize(("processor", "message"), WRONG_SCORES, ids=["nothing", "some", "flat", "NaN"])
def test_what_a_processor_may_not_return_is_named(processor: object, message: str) -> None:
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

    asked = {"max_new_tokens": 3, "logits_processor": [force], "output_scores": True, "return_dict": True, **setting}
    made = generator().sample([[1, 2]], **asked)  # type: ignore[arg-type]
    assert isinstance(made, GenerationResult)
    assert made.sequences.tolist() == [[1, 2, 7, 7, 7]] and made.logprobs == [[0.0, 0.0, 0.0]]


def test_a_pad_id_of_another_kind_is_refused_before_anything_is_decoded() -> None:
    one = generator()
    with pytest.raises(SamplingError, match="pad_token_id must be an integer or None, not str 'pad'"):
        one.sample([[1, 2]], pad_token_id="pad")  # type: ignore[arg-type]
    assert one.target.body.forwards == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("fused", "said"), [(True, True), (None, False)])
def test_what_was_asked_for_by_name_and_cannot_be_done_is_said(
    caplog: pytest.LogCaptureFixture, fused: bool | None, said: bool
) -> None:
    draft = TableDecoder(TARGET)
    made = SpeculativeGenerator(draft, TableDecoder(TARGET), k=2, fused=fused)
    with caplog.at_level(logging.WARNING, "paceline"):
        made.sample([[1, 2]], max_new_tokens=3, output_scores=True)
    assert ("two graphs" in caplog.text) == said


def test_a_drafter_without_the_base_class_is_refused_by_name() -> None:
    class Old:
        """As drafters were written before there was a base class."""

        draft_shape, reads, max_positions = DraftShape.chain(2), None, None

        def propose(self, *given: object) -> None: ...

    with pytest.raises(ConfigurationError, match="Old has the methods of a drafter and not its base class; derive it"):
        SpeculativeGenerator(Old(), TableDecoder(TARGET))


def test_a_depth_of_numpy_is_a_depth() -> None:
    made = SpeculativeGenerator("ngram", TableDecoder(TARGET), k=np.int64(3))  # type: ignore[arg-type]
    assert made.drafter.draft_shape.num_draft_tokens == 3


def test_a_width_below_the_proposal_is_refused() -> None:
    draft, target = TableDecoder(TARGET), TableDecoder(TARGET)
    with pytest.raises(ConfigurationError, match="width must be an integer or None, not '5'"):
        SpeculativeGenerator(draft, target, k=2, verify_width="5")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="verify_width=2 is too small for 2 drafted tokens"):
        SpeculativeGenerator(draft, target, k=2, verify_width=2)
    with pytest.raises(ConfigurationError, match="verify_width=0 is too small for 0 drafted"):
        SpeculativeGenerator(None, target, k=0, verify_width=0)


def test_a_pair_of_different_batch_sizes_is_refused() -> None:
    with pytest.raises(PairingError, match="batch_size=2 and the target 1"):
        SpeculativeGenerator(TableDecoder(TARGET, slots=2), TableDecoder(TARGET))


def test_values_of_sampling_without_do_sample_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """transformers-neuronx samples there; here it is greedy."""
    made = generator()
    for keywords in ({"top_k": 50, "do_sample": False}, {"top_k": 50, "do_sample": True, "seed": 1}, {}):
        made.sample([[1, 2]], max_new_tokens=2, **keywords)
    assert "without do_sample=True" not in caplog.text
    for _ in range(2):
        made.sample([[1, 2]], max_new_tokens=2, top_k=50)
    assert caplog.text.count("top_k without do_sample=True: decoding is greedy") == 1
