"""Structured output inside speculation: always valid where the length allows, and always the tokens of plain decoding.

Names such as vllm#44993 are bugs of other engines that the test would find; a mask on another request's rows
(vllm#49694) is in `test_mixed_rows.py`, a bias missing at drafted positions (vllm#42744) in `test_token_rules.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from paceline import ReasoningMarkers, SpeculativeGenerator
from paceline.core.errors import SamplingError
from paceline.text.structured_output import MAX_SOURCE_BYTES, GrammarCompiler, StructuredOutput
from tests.fakes import TableDecoder, near, table
from tests.orchestrator.json_tokens import BOS, END, EOS, SIZE, VOCABULARY, tokenizer
from tests.orchestrator.test_trees import Orchard
from tests.sampled import run, texts

TARGET = table(SIZE, seed=3, spread=2.0)
DRAFT = near(TARGET, seed=4, spread=0.6)
WORDS = tokenizer()
NEW = 40


def closed(**properties: object) -> dict[str, object]:
    """The schema of an object with exactly these keys, and no white space."""
    keys = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "object", **keys, "x-guidance": {"whitespace_flexible": False}}


FLAT = closed(a={"type": "boolean"}, b={"type": "integer", "minimum": 0, "maximum": 99})
NESTED = closed(abc={"type": "array", "items": {"enum": ["a", "bc", None]}, "minItems": 1, "maxItems": 3})
ASKED = {
    "flat": StructuredOutput("json_schema", FLAT),
    "nested": StructuredOutput("json_schema", json.dumps(NESTED)),
    "regex": StructuredOutput("regex", r"(ab|c){1,4}-[0-9]{2}"),
    "choice": StructuredOutput("choice", ["true", "abc", "ab"]),
    "grammar": StructuredOutput("grammar", 'start: "[" item ("," item)* "]"\nitem: "a" | "b" item'),
}
LARGE = "start: " + " ".join(f"r{i}" for i in range(2000)) + "".join(f'\nr{i}: "a" | "b" r{i}' for i in range(2000))


def valid(kind: str, text: str) -> bool:
    """Judged by other code than what made it."""
    if kind == "regex":
        return re.fullmatch(r"(ab|c){1,4}-[0-9]{2}", text) is not None
    if kind == "choice":
        return text in ("true", "abc", "ab")
    if kind == "grammar":
        return re.fullmatch(r"\[(b*a)(,b*a)*\]", text) is not None
    jsonschema.validate(json.loads(text), FLAT if kind == "flat" else NESTED)
    return True


def generator(mode: str, target: Tensor = TARGET, draft_of_it: Tensor = DRAFT) -> SpeculativeGenerator:
    draft: object = {
        "model": TableDecoder(draft_of_it, slots=4, eos=(EOS,)),
        "tree": Orchard([], grown=False),
        "grown": Orchard([], grown=True),
    }.get(mode, None if mode == "plain" else mode)
    options = {"k": 3} if mode in ("model", "ngram", "suffix") else {}
    return SpeculativeGenerator(draft, TableDecoder(target, slots=4, eos=(EOS,)), **options)  # type: ignore[arg-type]


def outputs(made: SpeculativeGenerator, kind: str, *, drawn: bool, count: int = 8) -> list[tuple[list[int], str]]:
    prompts = [[BOS, place % SIZE] for place in range(count)]
    setting = {"do_sample": True, "temperature": 1.0, "seed": 5} if drawn else {}
    done = run(made, prompts, max_new_tokens=NEW, structured_outputs=ASKED[kind], tokenizer=WORDS, **setting)
    return [(row[2:], reason) for row, reason in zip(texts(done), done.finish_reasons, strict=True)]


def one(made: SpeculativeGenerator, kind: str, **asked: object) -> list[int]:
    """A text without its first token."""
    return texts(run(made, [[BOS]], structured_outputs=ASKED[kind], tokenizer=WORDS, max_new_tokens=NEW, **asked))[0][
        1:
    ]


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_structured_outputs_are_valid_and_equal_plain_decoding(drawn: bool) -> None:
    """sglang#9187: a drafter is stuck where the draft does not fit the grammar."""
    finished = checked = 0
    for kind in ASKED:
        plain = outputs(generator("plain"), kind, drawn=drawn)
        for ids, reason in plain:
            text = WORDS.decode(ids, skip_special_tokens=True)
            assert (reason == "stop") == (ids[-1] == EOS) and EOS not in ids[:-1]
            if reason == "stop":
                assert valid(kind, text), (kind, text)
                finished += 1
        for mode in ("ngram", "suffix", "model", "tree", "grown"):
            assert outputs(generator(mode), kind, drawn=drawn) == plain, (kind, mode)
            checked += len(plain)
    assert finished >= 30 and checked == 200


def test_a_draft_model_under_the_mask_is_accepted_about_as_much_as_without_a_grammar() -> None:
    """vllm#53777: the same draft is rejected forever."""
    made = generator("model")
    outputs(made, "flat", drawn=False)
    assert made.statistics.acceptance_rate > 0.5  # most of it is forced, and the rest is chosen under the mask


@pytest.mark.parametrize("special", [False, True], ids=["text", "special token"])
def test_the_grammar_starts_after_the_reasoning_even_inside_a_draft(special: bool) -> None:
    """vllm#44993: drafted tokens after the end of the reasoning are under the grammar, and move it."""
    words = tokenizer()
    if special:
        words.add_special_tokens({"additional_special_tokens": ["<end>"]})
    asked = StructuredOutput("json_schema", FLAT, after=ReasoningMarkers("<end>"))
    likely = torch.zeros(SIZE)
    likely[END] = 3.0  # so that the reasoning ends soon
    prompts = [[BOS, place] for place in range(8)]
    params = {"max_new_tokens": 60, "structured_outputs": asked, "tokenizer": words, "do_sample": True, "seed": 5}
    plain: dict[int, list[int]] = {}
    finished = crossed = 0
    for mode in ("plain", "ngram", "suffix", "model", "tree", "grown"):
        found: dict[int, list[int]] = {place: [] for place in range(8)}
        for output in generator(mode, TARGET + likely, DRAFT + likely).stream(prompts, **params):  # type: ignore[arg-type]
            found[output.index] += output.tokens
            crossed += mode == "model" and END in output.tokens[: output.accepted][:-1]
            if output.finish_reason == "stop" and mode == "plain":
                reasoning, answer = found[output.index], found[output.index][:]
                del answer[: reasoning.index(END) + 1]
                assert valid("flat", words.decode(answer, skip_special_tokens=True))
                finished += 1
        plain = plain or found
        assert found == plain, mode
    assert finished >= 4 and crossed > 0


def test_opened_reasoning_precedes_the_grammar() -> None:
    grammars = GrammarCompiler(SIZE)

    def accepted(text: str, after: ReasoningMarkers) -> bool:
        grammar = grammars.compile(StructuredOutput("choice", ["abc"], after=after), WORDS, eos=frozenset({EOS}))
        ids = [*WORDS.encode(text), EOS]
        return grammar.state().accepts([], ids) == len(ids)

    assert [accepted(text, ReasoningMarkers("}")) for text in ("ab-y}abc", "}abc", "abc", "ab-y}ab")] == [
        True, True, False, False,
    ]  # fmt: skip
    optional = ReasoningMarkers("}", start="{")
    assert [accepted(text, optional) for text in ("{ab-y}abc", "abc", "ab-y}abc", "{abc")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_any_eos_id_appears_only_where_the_grammar_accepts() -> None:
    made = generator("ngram")
    ids = one(made, "choice", eos_token_id=[EOS, END], logit_bias={END: 100.0, EOS: -100.0})
    assert ids[-1] == END and valid("choice", WORDS.decode(ids[:-1])), ids
    never = one(made, "choice", eos_token_id=[EOS], logit_bias={EOS: -100.0})
    assert never[-1] == EOS  # nothing else may follow there, whatever the bias


@pytest.mark.parametrize(
    ("mode", "kind", "asked"),
    [("model", "choice", {"min_tokens": 20}), ("suffix", "flat", {"logit_bias": {VOCABULARY["y"]: 100.0}})],
)
def test_the_grammar_is_stronger_than_min_tokens_and_a_bias(mode: str, kind: str, asked: dict[str, object]) -> None:
    """vllm#54437: masks that fail open for lost drafts."""
    ids = one(generator(mode), kind, **asked)
    assert ids[-1] == EOS and valid(kind, WORDS.decode(ids[:-1]))


def test_scores_and_tokens_end_together_with_the_text() -> None:
    """vllm#47616: ids and log-probabilities after a stop are returned."""
    asked = {"structured_outputs": ASKED["flat"], "tokenizer": WORDS, "max_new_tokens": NEW}
    done = run(generator("model"), [[BOS]] * 3, logprobs=2, **asked)
    assert done.token_logprobs is not None
    for text, said in zip(texts(done), done.token_logprobs, strict=True):
        assert [one.token for one in said] == text[1:]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (StructuredOutput("json_schema", {"type": "objec"}), "Invalid type"),
        (StructuredOutput("json_schema", {"not": {"type": "string"}}), r'Unimplemented keys: \["not"\]'),
        (StructuredOutput("json_schema", "{"), "this json_schema cannot be"),
        (StructuredOutput("regex", "("), "unclosed group"),
        (StructuredOutput("grammar", "start: nobody"), "this grammar cannot be compiled"),
        (StructuredOutput("grammar", LARGE), "too big"),
    ],
)
def test_an_invalid_grammar_is_rejected_before_any_work(asked: StructuredOutput, said: str) -> None:
    made = generator("ngram")
    with pytest.raises(SamplingError, match=said):
        made.sample([[BOS]], structured_outputs=asked, tokenizer=WORDS)  # type: ignore[call-overload]
    assert made.target.body.forwards == 0  # type: ignore[attr-defined]


def test_a_grammar_without_tokenizer_or_eos_is_rejected() -> None:
    made = generator("ngram")
    for more, said in (
        ({}, "expected a fast Hugging Face tokenizer"),
        ({"tokenizer": WORDS, "eos_token_id": []}, "expected an eos id"),
        ({"tokenizer": WORDS, "ignore_eos": True}, "ignore_eos: expected False with structured_outputs, which"),
    ):
        with pytest.raises(SamplingError, match=said):
            made.sample([[BOS]], structured_outputs=ASKED["flat"], **more)  # type: ignore[call-overload]
    for kind, value in (("choice", []), ("choice", "abc"), ("regex", ""), ("json_object", "{}"), ("xml", "a")):
        with pytest.raises(SamplingError, match="structured_outputs: expected"):
            StructuredOutput(kind, value)  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match="structured_outputs: expected at most"):
        StructuredOutput("regex", "a" * (MAX_SOURCE_BYTES + 1))


class Watched:
    """llguidance's matcher, which fails if it is given an eos id.

    Seen in 1.9.1: one that has stopped takes the id without counting it, so that `rollback` takes back a token of the
    text instead, and two of its methods that check tokens differ by one.
    """

    def __init__(self, matcher: Any, read: list[int]) -> None:
        self._matcher, self._given = matcher, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> Watched:
        return Watched(self._matcher.deep_copy(), self._given)

    def consume_tokens(self, tokens: list[int]) -> Any:
        self._given += tokens
        return self._matcher.consume_tokens(tokens)

    def validate_tokens(self, tokens: list[int]) -> Any:
        self._given += tokens
        return self._matcher.validate_tokens(tokens)


def test_the_matcher_is_never_given_an_eos_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft that ends texts too early and continues after the end, and in plain decoding."""
    given: list[int] = []
    compiled = GrammarCompiler.compile

    def watched(self: GrammarCompiler, *args: Any, **options: Any) -> Any:
        grammar = compiled(self, *args, **options)
        if not isinstance(grammar._matcher, Watched):
            grammar._matcher = Watched(grammar._matcher, given)
        return grammar

    monkeypatch.setattr(GrammarCompiler, "compile", watched)
    eager = DRAFT.clone()
    eager[..., EOS] += 3
    ends = [
        one(SpeculativeGenerator(draft, TableDecoder(TARGET), k=4), "choice", eos_token_id=[END, EOS])
        for draft in (None, TableDecoder(DRAFT), TableDecoder(eager))
    ]
    assert ends[0] == ends[1] == ends[2] and ends[0][-1] in (END, EOS)
    assert given and not {END, EOS} & set(given)
