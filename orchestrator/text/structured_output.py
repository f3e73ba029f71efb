"""Structured output, with vLLM's names (`StructuredOutput`), and masks of the tokens that may follow: llguidance
grammars.

Grammars are compiled when a request is made, in the caller's thread, never between rounds. A state is a function of
the output so far: it follows drafts and is rolled back from rejected ones. A library must provide the mask at every
drafted token: xgrammar 0.2.8 omits those after an end token. `paceline.text.row_processing` applies the masks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from paceline.core.errors import SamplingError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from torch import Tensor

StructuredKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]

MAX_SOURCE_BYTES = 1 << 16
"""Maximum length of a schema, expression or grammar as UTF-8. A longer one compiles to more than the size limits
allow.
"""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers of free text before structured output.

    end    the text, or the special token, after which the constraint applies
    start  opens the free text, if there is any; "": the prompt has opened it, so it always comes first
    """

    end: str
    start: str = ""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Constraint on the whole text of a response, or on the part after its reasoning block.

    kind   json_schema: JSON that a JSON schema admits; json_object: any JSON object; regex: what a regular expression
           matches from its first to its last character (without look-around); grammar: a context-free grammar in
           llguidance's Lark format; choice: one of some strings
    value  the schema (a mapping, or JSON text), None, the expression, the grammar, or the strings
    after  markers of reasoning that may come first; None: there is none

    Raises:
        SamplingError: the kind is unknown, or the value does not match it.
    """

    kind: StructuredKind
    value: Mapping[str, object] | str | Sequence[str] | None = None
    after: ReasoningMarkers | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructuredKind):
            kinds = ", ".join(get_args(StructuredKind))
            raise SamplingError(
                f"structured_outputs: expected one of {kinds} as the kind, got {self.kind!r}; use one of them"
            )
        wrong = None
        if self.kind == "json_schema":
            wrong = None if isinstance(self.value, (Mapping, str)) else "a JSON schema: a mapping, or JSON text"
        elif self.kind == "json_object":
            wrong = None if self.value is None else "nothing, since any JSON object is allowed"
        elif self.kind == "choice":
            listed = isinstance(self.value, Sequence) and not isinstance(self.value, str)
            good = listed and self.value and all(isinstance(one, str) and one for one in self.value or ())
            wrong = None if good else "a list of strings that are not empty"
        elif not isinstance(self.value, str) or not self.value:
            wrong = "a string that is not empty"
        if wrong is not None:
            raise SamplingError(
                f"structured_outputs: expected {wrong}, for kind {self.kind!r}, got {self.value!r:.60}; correct it"
            )
        if (size := len(self.source.encode())) > MAX_SOURCE_BYTES:
            raise SamplingError(
                f"structured_outputs: expected at most {MAX_SOURCE_BYTES} bytes, got {size}; use a simpler one"
            )

    @property
    def source(self) -> str:
        """Return the value as text: equal for equal constraints."""
        if isinstance(self.value, str):
            return self.value
        try:
            return json.dumps(self.value)  # in the order given: properties come in the schema's order
        except (TypeError, ValueError, RecursionError) as error:
            raise SamplingError(
                f"structured_outputs: the schema cannot be written as JSON ({error}); use plain values"
            ) from None


_KEPT = 64
"""Number of compiled grammars, and of tokenizers, cached for later requests."""


class Grammar:
    """A compiled grammar, shared by all requests with that constraint. ``matcher`` always stays at its start."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, eos: Collection[int]) -> None:
        self._matcher, self._vocab_size, self._eos = matcher, vocab_size, sorted(eos)

    def state(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), vocab_size=self._vocab_size, eos=self._eos)


class GrammarState:
    """Position of one text in its grammar. All methods take the output so far, without the prompt."""

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, eos: Sequence[int]) -> None:
        import torch

        self._matcher, self._vocab_size, self._eos = matcher, vocab_size, frozenset(eos)
        self._bits = torch.arange(8, dtype=torch.uint8)
        self._eos_ids = torch.tensor(list(eos), dtype=torch.int64)
        self._read: list[int] = []

    def allowed(self, output: Sequence[int]) -> Tensor:
        """Return the mask of tokens that may follow: [V] bool. An eos id may follow exactly where the grammar accepts
        the text.

        Raises:
            SamplingError: the grammar exceeds the work limit of a token.
        """
        import torch

        if not self._go_to(output):  # a draft that continues after an end, or with a forbidden token
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check(len(output))
        mask = (packed.unsqueeze(1) >> self._bits & 1).flatten()[: self._vocab_size].bool()
        mask[self._eos_ids] = self._matcher.is_accepting()
        return mask

    def accepts(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after the other; an eos id is the last that may."""
        if not self._go_to(output):
            return 0
        count = len(self._legal(tokens))
        if count < len(tokens) and tokens[count] in self._eos:
            self._go_to([*output, *tokens[:count]])
            count += self._matcher.is_accepting()
        return count

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Return up to ``limit`` tokens that the grammar forces, as the tokenizer would encode them.

        Only a proposal: the same characters may also be encoded as other tokens.
        """
        if not self._go_to(output):
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:limit] if not self._matcher.is_stopped() else []
        tokens = tokens[: self.accepts(output, tokens)]
        self._go_to([*output, *tokens])
        if len(tokens) < limit and self._matcher.is_stopped():
            tokens = [*tokens, min(self._eos)]
        return tokens

    def _go_to(self, output: Sequence[int]) -> bool:
        """Roll back to where the outputs differ, and read on as far as the grammar allows. -> whether that is all of
        it.
        """
        read, output = self._read, list(output)
        same = len(read) if output[: len(read)] == read else _common(read, output)
        if same < len(read):
            self._matcher.rollback(len(read) - same)
        more = self._legal(output[same:])
        if more:
            self._matcher.consume_tokens(more)
        self._read = output[: same + len(more)]
        self._check(len(output))
        return len(self._read) == len(output)

    def _legal(self, tokens: Sequence[int]) -> list[int]:
        """The first of these tokens that may follow, without an eos id."""
        places = enumerate(tokens)
        end = next((at for at, token in places if token in self._eos or not 0 <= token < self._vocab_size), len(tokens))
        return list(tokens[: self._matcher.validate_tokens(list(tokens[:end]))]) if end else []

    def _check(self, length: int) -> None:
        if self._matcher.is_error():
            raise SamplingError(
                f"structured_outputs: the grammar has no continuation after {length} output tokens "
                f"({_first_line(self._matcher.get_error())}); use a simpler one"
            )


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the latest. From any thread."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = lru_cache(_KEPT)(self._read_words)
        self._compiled = lru_cache(_KEPT)(self._compile)

    def compile(self, requested: StructuredOutput, tokenizer: object, *, eos: frozenset[int]) -> Grammar:
        """Return the grammar of a request; SamplingError: it cannot be compiled, or not for this tokenizer."""
        if isinstance(requested.value, Mapping):  # which cannot be looked up
            requested = replace(requested, value=requested.source)
        elif isinstance(requested.value, list):
            requested = replace(requested, value=tuple(requested.value))
        return self._compiled(requested, tokenizer, eos)

    def _compile(self, requested: StructuredOutput, tokenizer: object, eos: frozenset[int]) -> Grammar:
        matcher = _matcher(requested, self._words(tokenizer), tokenizer)
        return Grammar(matcher, vocab_size=self._vocab_size, eos=eos)

    def _read_words(self, tokenizer: object) -> LLTokenizer:
        """The tokenizer's words as bytes."""
        from llguidance import LLTokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise SamplingError(
                "tokenizer: expected one with a backend_tokenizer for structured_outputs, got "
                f"{type(tokenizer).__name__}; pass a fast Hugging Face tokenizer as tokenizer=..."
            )
        unpadded = type(backend).from_str(backend.to_str())
        unpadded.no_padding()
        unpadded.no_truncation()
        size = max(self._vocab_size, unpadded.get_vocab_size(with_added_tokens=True))
        eos = getattr(tokenizer, "eos_token_id", None)
        return LLTokenizer(unpadded.to_str(), n_vocab=size, eos_token=0 if eos is None else eos)


def _matcher(requested: StructuredOutput, words: LLTokenizer, tokenizer: object) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    source = requested.source
    try:
        if requested.kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(source)
        elif requested.kind == "json_object":
            grammar = LLMatcher.grammar_from_json_schema('{"type": "object"}')
        elif requested.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        elif requested.kind == "choice":
            choices = json.loads(source)
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
        else:
            grammar = LLMatcher.grammar_from_lark(source)
    except ValueError as error:
        raise SamplingError(f"structured_outputs: this {requested.kind} cannot be read ({error}); correct it") from None
    if requested.after is not None:
        grammar = _behind_reasoning(requested.after, grammar, tokenizer)
    # Work of compiling (a few tenths of a second) and of one mask (about 15 ms), and memory. Counts, not seconds, so
    # that the same grammar is rejected on every machine.
    limits = LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=10_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(words, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise SamplingError(
            f"structured_outputs: this {requested.kind} cannot be compiled: {_first_line(matcher.get_error())}; see "
            "docs/structured.md for what is supported"
        )
    return matcher


def _behind_reasoning(markers: ReasoningMarkers, grammar: str, tokenizer: object) -> str:
    """Return the grammar with free text before it, and the line breaks that templates write after a marker."""
    is_list = grammar.lstrip().startswith("{")  # llguidance's list, made of a schema; else it is Lark
    answer, *others = json.loads(grammar)["grammars"] if is_list else [{"lark_grammar": grammar}]
    special = _special_token(markers.end, tokenizer)
    text = "/(?s:.*)/"
    free = f"thought: {text} {special}" if special else f"thought[suffix={json.dumps(markers.end)}]: {text}"
    opening = _special_token(markers.start, tokenizer) or json.dumps(markers.start)
    first = f"({opening} thought BREAKS?)?" if markers.start else "thought BREAKS?"
    lark = f"start: {first} @answer\n{free}\nBREAKS: /\\n{{1,3}}/"
    grammars = [{"name": "reasoning", "lark_grammar": lark}, {**answer, "name": "answer"}, *others]
    return json.dumps({"grammars": grammars})


def _special_token(marker: str, tokenizer: object) -> str | None:
    """Return a special-token marker, which is not text, as llguidance writes it; None if the marker is text."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    added = backend.get_added_tokens_decoder()
    return next((f"<[{number}]>" for number, one in added.items() if one.special and one.content == marker), None)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _first_line(message: str) -> str:
    """Return an error of llguidance without its dump of the state."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip(" ^|")]
    return " ".join(lines)[:300]
