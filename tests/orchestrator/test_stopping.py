"""A text ends at its earliest reason, token by token, wherever the borders of windows and tokens are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.core.errors import SamplingError
from paceline.core.sampling import Sampling
from paceline.engine.batch import Slot
from paceline.engine.request import Request
from paceline.outputs import GenerationResult
from paceline.text.stop_strings import StopStrings
from tests import sampled
from tests.draft.tokenizers_of_two import every_byte
from tests.fakes import Checked, TableDecoder, scripted
from tests.fakes_text import Pieces
from tests.orchestrator.drafting import anti_oracle, oracle

V = 16
SCRIPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0]
WINDOWS = [0, 1, 2, 3, 4, 5, 8, 12]  # drafted tokens per round


def generator(k: int, *, script: Sequence[int] = SCRIPT, right: bool = True, **decoder: object) -> SpeculativeGenerator:
    target = TableDecoder(scripted(script, V), **decoder)  # type: ignore[arg-type]
    if not k:
        return SpeculativeGenerator(None, target)
    made = oracle([script], k) if right else anti_oracle([script], k, vocab_size=V)
    return Checked(FunctionDrafter(made, k), target, k=k)


def run(g: SpeculativeGenerator, prompt: Sequence[int], **asked: object) -> tuple[list[int], str, GenerationResult]:
    result = sampled.run(g, [list(prompt)], **asked)
    return result.sequences[0].tolist(), result.finish_reasons[0], result


class Seen(StoppingCriteria):
    """Writes down what it is shown; stops at a length."""

    def __init__(self, at: int) -> None:
        self.at, self.texts = at, []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        assert input_ids.dtype == torch.int64
        self.texts.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.at])


@pytest.mark.parametrize("k", WINDOWS)
@pytest.mark.parametrize(
    ("prompt", "asked", "size", "why"),
    [
        *(([1], {"eos_token_id": eos, "max_new_tokens": 12}, 3, "stop") for eos in ([3], [9, 3], [3, 4])),
        *(([1], {"eos_token_id": eos, "max_new_tokens": 15}, eos, "stop") for eos in range(2, 13)),
        ([1, 2, 3], {"eos_token_id": 3, "max_new_tokens": 2}, 5, "length"),
        ([1], {"eos_token_id": 4, "max_new_tokens": 5}, 4, "stop"),
        ([1], {"eos_token_id": 6, "max_new_tokens": 4}, 5, "length"),
        ([1], {"eos_token_id": 5, "max_new_tokens": 4}, 5, "stop"),
        ([1], {"stopping_criteria_list": [Seen(5)], "eos_token_id": 6, "max_new_tokens": 8}, 5, "criteria"),
        ([1], {"stopping_criteria_list": [Seen(6)], "eos_token_id": 5, "max_new_tokens": 8}, 5, "stop"),
        ([1], {"stopping_criteria_list": [Seen(8)], "max_new_tokens": 3}, 4, "length"),
        ([1], {"stopping_criteria_list": StoppingCriteriaList([MaxLengthCriteria(6)])}, 6, "length"),
        ([1], {"stop_strings": "d", "tokenizer": Pieces([b"", *b"a b c d e f g h".split()] + [b"z"] * 9),
          "eos_token_id": 5, "max_new_tokens": 9}, 4, "stop"),
    ],
    ids=lambda given: "+".join(given) if isinstance(given, dict) else str(given),
)  # fmt: skip
def test_the_earliest_reason_wins(k: int, prompt: list[int], asked: dict[str, object], size: int, why: str) -> None:
    """An end id stays in the text, wherever it is in a window; one in the prompt ends nothing."""
    text, reason, result = run(generator(k), prompt, **asked)
    assert (text, reason) == (list(range(1, size + 1)), why)
    assert result.statistics.new_tokens == size - len(prompt)


def test_the_checkpoints_eos_ids_apply_unless_others_are_given() -> None:
    assert run(generator(4, eos=(6, 5)), [1])[0] == [1, 2, 3, 4, 5]
    assert run(generator(4, eos=(6, 5)), [1], eos_token_id=4)[0] == [1, 2, 3, 4]
    assert run(generator(4, eos=(6, 5)), [1], eos_token_id=[], max_new_tokens=8)[0] == list(range(1, 10))


@pytest.mark.parametrize("k", WINDOWS)
def test_id_zero_and_the_pad_id_are_tokens_like_any_other(k: int) -> None:
    script = [5, 0, 7, 0, 0, 9, 7, 7, 3, 0]
    text, reason, result = run(generator(k, script=script, pad=7), [5], max_new_tokens=9)
    assert (text, reason, result.lengths) == (script, "length", [10])


E9, ACCENT = b"\xc3", b"\xa9"
STOP, GO = ["stop"], [b"st", b"op", b" go", b" st", b"op", b"."]
OUTPUT = StopStrings(("stop",), scope="output")
"""Stop strings as in the responses of OpenAI's service, which do not begin in the prompt."""
OVERHANG = [  # strings, pieces of a text, how many of them are the prompt, how many are kept
    (STOP, [b"st", b"opera", b"s"], 0, 2),
    (STOP, [b"las", b"topper", b"s"], 0, 2),
    (STOP, [b"s", b"t", b"o", b"p", b" x"], 0, 4),
    (STOP, [b" x", b"stop", b"s"], 0, 2),
    (STOP, [b" stopper", b" x"], 0, 1),
    (["top", "opera"], [b"st", b"opera", b" x"], 0, 2),
    (["x\n\n"], [b"a x", b"\n", b"\nb", b"c"], 0, 3),
    (["\u00e9"], [b"a", E9, ACCENT, b"b"], 0, 3),
    (["\u00e9t"], [b"a", E9, ACCENT, b"t", b"b"], 0, 4),
    (["\u20ac!"], [b"\xe2", b"\x82", b"\xac", b"!!", b"x"], 0, 4),
    (["a\u00e9"], [b"aa\xc3", ACCENT, b"b"], 0, 2),
    (STOP, [b"a sto", b"p\xc3", ACCENT, b"b"], 0, 2),  # an unfinished character hides nothing before it
    (STOP, GO, 1, 2),  # it may begin in the prompt, but not end there
    (STOP, GO, 2, 5),
    (OUTPUT, GO, 1, 5),
    (OUTPUT, GO, 4, 6),  # nowhere
    (StopStrings(("\u00e9t",), scope="output"), [b"x" + E9, ACCENT + b"t", b"."], 1, 2),  # a character crosses it
]


@pytest.mark.parametrize("k", WINDOWS)
@pytest.mark.parametrize(("strings", "pieces", "given", "kept"), OVERHANG, ids=str)
def test_stop_string_across_windows_and_tokens_ends_the_text(
    strings: list[str] | StopStrings, pieces: list[bytes], given: int, kept: int, k: int
) -> None:
    names = [b"<", *pieces, *[b"z%d" % i for i in range(V)]]
    script = list(range(len(pieces) + 4))
    asked = {"stop_strings": strings, "tokenizer": Pieces(names), "max_new_tokens": len(pieces) - given}
    text, reason, _ = run(generator(k, script=script), script[: given + 1], **asked)
    assert (text, reason) == (script[: kept + 1], "length" if (strings, given) == (OUTPUT, 4) else "stop")


WORDS = every_byte()


def checker(strings: StopStrings, prompt: Sequence[int] = ()) -> Slot:
    """Result of a request with these strings, whose text is long enough."""
    return Slot(Request(0, tuple(prompt), Sampling(), 100, stop_strings=strings, tokenizer=WORDS))


@settings(max_examples=100)
@given(
    tokens=st.lists(st.sampled_from([0, *WORDS.encode("ab the")]), min_size=1, max_size=10),
    stops=st.lists(st.sampled_from(["ab", "a<e>b", "<e>", "e<", "b the"]), min_size=1, max_size=3, unique=True),
)
def test_special_tokens_appear_in_the_text_as_with_hugging_face(tokens: list[int], stops: list[str]) -> None:
    theirs = StopStringCriteria(WORDS, stops)
    ours = checker(StopStrings(tuple(stops)), tokens[:1])
    for size in range(2, len(tokens) + 1):
        stop = bool(theirs(torch.tensor([tokens[:size]]), None))
        assert (ours.append(tokens[size - 1]) == "stop") == stop
        if stop:
            return


def test_host_verified_rounds_stop_where_plain_decoding_does() -> None:
    """The verifier appends the tokens of a round, and the batch is then given the same ones; each is looked at once."""
    new = [*WORDS.encode("the ab"), 0, *WORDS.encode("the"), 0, *WORDS.encode("b the b the")]
    strings = StopStrings(("b the",), scope="output")
    plain = checker(strings)
    end = next(place for place, token in enumerate(new) if plain.append(token) is not None) + 1
    assert 0 < end < len(new)
    for size in (1, 2, 3):
        one, length = checker(strings), 0
        for at in range(0, len(new), size):
            tokens: list[int] = []
            for token in new[at : at + size]:
                tokens.append(token)
                if one.append(token) is not None:
                    break
            kept, reason = one.extend(tokens)
            length += kept
            assert kept == len(tokens) and (reason == "stop") == (length == end)
            if reason is not None:
                break
        assert one.text == new[:end]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("k", WINDOWS[1:])
def test_a_criterion_sees_every_committed_token_once_with_the_text_before_it(k: int, right: bool) -> None:
    seen = Seen(7)
    text, reason, _ = run(generator(k, right=right), [1, 2], stopping_criteria_list=[seen], max_new_tokens=12)
    assert (text, reason) == ([1, 2, 3, 4, 5, 6, 7], "criteria")
    assert seen.texts == [list(range(1, size + 1)) for size in range(3, 8)]


def test_max_time_is_reported_as_the_finish_reason() -> None:
    over = StoppingCriteriaList([MaxTimeCriteria(1.0, initial_timestamp=time.time() - 10)])
    assert run(generator(4), [1], stopping_criteria_list=over)[:2] == ([1, 2], "time")


def test_a_criterion_may_answer_with_a_plain_bool() -> None:
    assert run(generator(4), [1], stopping_criteria_list=[lambda ids, _: ids.shape[1] > 3])[0] == [1, 2, 3, 4]


@pytest.mark.parametrize("k", WINDOWS)
def test_tokens_cut_by_a_stop_are_not_counted(k: int) -> None:
    events = list(generator(k).stream([[1]], eos_token_id=5))
    assert [t for event in events for t in event.tokens] == [2, 3, 4, 5]
    for event in events:
        assert 0 <= event.accepted <= len(event.tokens)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_a_criterion_without_scores_is_called() -> None:
    def guarded(ids: torch.Tensor, scores: Any, **_: object) -> bool:
        return scores is not None and bool(scores[-1].max() > 0.5)

    for criterion in (guarded, lambda ids, scores, **more: guarded(ids, scores, **more), lambda ids, scores: scores):
        assert run(generator(4), [1], stopping_criteria_list=[criterion], max_new_tokens=3)[0] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "criterion",
    [
        lambda ids, scores: scores[-1].softmax(-1).max() > 0.5,
        lambda ids, scores: scores.max() > 1,
        lambda _, scores: max(scores) > 1,
    ],
)
def test_a_criterion_that_reads_scores_is_rejected_by_name(criterion: Any) -> None:
    """The criterion gets None, as from `generate` without output_scores."""
    with pytest.raises(SamplingError, match=r"reads scores.*None, as in `generate` without output_scores"):
        run(generator(4), [1], stopping_criteria_list=[criterion], max_new_tokens=3)
