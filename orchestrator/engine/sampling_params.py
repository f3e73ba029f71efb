"""`SamplingParams`: sampling and stopping values of a call, checked at construction.

The keywords of `sample` are the fields of `SamplingParams`, which declares them once: commands, HTTP and workers build
the same value. `paceline.engine.request` makes requests of it.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeGuard

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ContextError, PromptError, SamplingError
from paceline.core.sampling import Sampling, row_seed
from paceline.text.stop_strings import StopStrings
from paceline.text.structured_output import StructuredOutput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.generation import logits_process as hf
    from transformers.generation.logits_process import LogitsProcessor
else:
    LogitsProcessor = Callable  # for code that reads the types of the fields

Criterion = Callable[..., object]
"""Hugging Face's `StoppingCriteria`: (ids [1, length] int64, scores or None) -> bool or bool tensor [1]."""

_CHECKS: dict[str, Callable[[object], bool]] = {
    "True or False": lambda value: isinstance(value, bool),
    "an integer": lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    "a number": lambda value: not isinstance(value, bool) and isinstance(value, Real) and _fits_a_float(value),
    "a string": lambda value: isinstance(value, str),
    "a list of callables": lambda value: isinstance(value, (list, tuple)) and all(map(callable, value)),
    "a mapping of ids to numbers": lambda value: (
        isinstance(value, Mapping)
        and all(_CHECKS["an integer"](key) and _CHECKS["a number"](value[key]) for key in value)
    ),
    "a string or a list of integers": lambda value: (
        isinstance(value, str) or (isinstance(value, (list, tuple)) and all(map(_CHECKS["an integer"], value)))
    ),
    "a StructuredOutput": lambda _value: False,  # except the class in `_Kind.also`
}
_USUAL: dict[str, type] = {"True or False": bool, "an integer": int, "a number": float, "a string": str}
_MOST_BIAS = 100
_PLURALS = {"True or False": "truth values", "an integer": "integers", "a string": "strings"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Allowed values of a keyword.

    one       name of such a value, a key of `_CHECKS`
    optional  None is possible
    listed    a list or tuple of such values is possible
    also      a class whose objects are possible
    least, most   of a number; None = any
    """

    one: str
    optional: bool = False
    listed: bool = False
    also: type | None = None
    least: float | None = None
    most: float = math.inf

    def accepts(self, value: object) -> bool:
        """Whether a value is of this kind. NumPy's numbers are numbers, and truth values are none."""
        fits = _CHECKS[self.one]
        if self.also is not None and isinstance(value, self.also):
            return True
        if self.listed and isinstance(value, (list, tuple)):
            return all(map(fits, value))
        return fits(value)

    def __str__(self) -> str:
        more = (f" or a list of {_PLURALS[self.one]}" if self.listed else "") + (" or None" if self.optional else "")
        return self.one + more


def _param(default: Any, kind: _Kind | None, text: str | None = None, *, in_process: bool = False) -> Any:
    """Field of a parameter whose values are of ``kind``; None: of any type.

    text        help text; commands, the HTTP API and experiments have the fields with one
    in_process  it holds objects of this process, which cannot be sent to another one
    """
    return field(default=default, metadata={"kind": kind, "help": text, "in_process": in_process})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping values of a call; the names are those of Hugging Face's `generate`.

    sequence_length         maximum length of a sequence, prompt included; the smaller of this and ``max_new_tokens``
                            holds
    max_new_tokens          maximum number of tokens after the prompt; default: up to the decoder's positions
    do_sample               False (default): greedy, the next four have no effect
    temperature, top_k, top_p, min_p   as in Hugging Face; None switches a filter off, and -1 top-k. Equal logits at the
                            border of top-k are all kept, so ``top_k=1`` samples among equal largest ones: it is not
                            greedy
    seed                    row 0 samples with it, row b with a hash of it and b; or one seed for every row; None: any
    eos_token_id            ids that stop a sequence; default: the checkpoint's; [] for none
    pad_token_id            fills shorter rows of the result; default: the checkpoint's, else its first eos id, else 0
    stop_strings            strings that stop a sequence, as Hugging Face's; need ``tokenizer``; see `StopStrings`
    stopping_criteria_list  Hugging Face criteria, called once per new token with ids [1, length] and no scores; one
                            that reads scores fails at its first call
    logits_processor        Hugging Face processors, called once per decided token, on the host
    no_repeat_ngram_size, repetition_penalty   as in Hugging Face, over prompt and output; they run as processors
    presence_penalty, frequency_penalty   -2 to 2, as in OpenAI's API: subtracted from the logit of every token of the
                                          output, once and per occurrence. The prompt does not count
    logit_bias              token id -> -100 to 100, added to its logit
    min_tokens              minimum number of new tokens before an eos id; stop strings and criteria may stop earlier
    ignore_eos              no id stops a sequence
    n                       continuations of every prompt, each with a separate seed: rows 0 to n - 1 are the first's
    logprobs                0 to 20: also return the model's log-probability of every new token and of this number of
                            the most likely ones, as in vLLM: before processors, penalties, grammar and temperature
    prompt_logprobs         0 to 20: the same for every token of the prompt except the first
    output_scores           also return the log-probability of every new token in the processed logits
    structured_outputs      constraint on the whole output; needs ``tokenizer``, a fast one of Hugging Face
    prediction              expected output, as text (needs ``tokenizer``) or as ids: a source of drafts that changes no
                            token
    use_speculation         False, or one entry for every prompt: draft nothing for it
    max_draft_tokens        maximum number of drafted tokens verified in a round; None = all that the drafter proposes
    drafter                 name of the one drafter of a choice that proposes; None = the best

    Raises:
        SamplingError: a value has the wrong type or is out of range.
    """

    sequence_length: int | None = _param(None, _Kind("an integer", optional=True))
    max_new_tokens: int | None = _param(None, _Kind("an integer", optional=True), "Maximum number of new tokens.")
    do_sample: bool = _param(False, _Kind("True or False"))
    temperature: float = _param(1.0, _Kind("a number"), "Sampling temperature: above 0 samples, 0 is greedy.")
    top_k: int | None = _param(
        None, _Kind("an integer", optional=True), "Keep only the K most likely tokens. Default: all."
    )
    top_p: float | None = _param(
        None,
        _Kind("a number", optional=True),
        "Nucleus sampling: keep the smallest token set whose probability sums to P. Default: off.",
    )
    min_p: float | None = _param(
        None, _Kind("a number", optional=True), "Drop tokens less likely than P times the likeliest. Default: off."
    )
    seed: int | Sequence[int] | None = _param(
        0,
        _Kind("an integer", optional=True, listed=True),
        "Seed of sampling; equal seeds give equal tokens, with any draft.",
    )
    eos_token_id: int | Sequence[int] | None = _param(None, _Kind("an integer", optional=True, listed=True))
    pad_token_id: int | None = _param(None, _Kind("an integer", optional=True))
    stop_strings: str | Sequence[str] | StopStrings | None = _param(  # noqa: RUF009
        None, _Kind("a string", optional=True, listed=True, also=StopStrings)
    )
    tokenizer: Decodes | None = _param(None, None, in_process=True)  # noqa: RUF009  # like the others
    stopping_criteria_list: Sequence[Criterion] | None = _param(
        None, _Kind("a list of callables", optional=True), in_process=True
    )
    logits_processor: Sequence[LogitsProcessor] | None = _param(
        None, _Kind("a list of callables", optional=True), in_process=True
    )
    no_repeat_ngram_size: int | None = _param(None, _Kind("an integer", optional=True))
    repetition_penalty: float | None = _param(
        None,
        _Kind("a number", optional=True),
        "Divide the logits of tokens in the prompt or output by this; 1 switches it off. Default: 1.",
    )
    presence_penalty: float = _param(
        0.0, _Kind("a number", least=-2, most=2), "Subtract this from the logits of tokens already generated (-2 to 2)."
    )
    frequency_penalty: float = _param(
        0.0,
        _Kind("a number", least=-2, most=2),
        "Subtract this from the logits of generated tokens once per occurrence (-2 to 2).",
    )
    logit_bias: Mapping[int, float] | None = _param(None, _Kind("a mapping of ids to numbers", optional=True))
    min_tokens: int = _param(
        0, _Kind("an integer", least=0), "Number of new tokens before an eos id may end the sequence."
    )
    ignore_eos: bool = _param(False, _Kind("True or False"), "Continue after eos ids.")
    n: int = _param(1, _Kind("an integer", least=1, most=128))
    logprobs: int | None = _param(
        None,
        _Kind("an integer", optional=True, least=0, most=20),
        "With --json: number of most likely tokens to report with log-probabilities at each position, 0 to 20. "
        "Default: none.",
    )
    prompt_logprobs: int | None = _param(
        None,
        _Kind("an integer", optional=True, least=0, most=20),
        "With --json: the same for the tokens of the prompt from the second on. Default: none.",
    )
    output_scores: bool = _param(False, _Kind("True or False"))
    structured_outputs: StructuredOutput | None = _param(  # noqa: RUF009
        None, _Kind("a StructuredOutput", optional=True, also=StructuredOutput)
    )
    prediction: str | Sequence[int] | None = _param(None, _Kind("a string or a list of integers", optional=True))
    use_speculation: bool | Sequence[bool] = _param(True, _Kind("True or False", listed=True))
    max_draft_tokens: int | None = _param(None, _Kind("an integer", optional=True))
    drafter: str | None = _param(None, _Kind("a string", optional=True))

    def __post_init__(self) -> None:
        for name, kind in _kinds():
            value = getattr(self, name)
            if value is None and kind.optional:
                continue
            # Most values are plain, and a check against an abstract class takes a microsecond.
            if type(value) is not _USUAL.get(kind.one) and not kind.accepts(value):
                remedy = "put a single one into a list" if kind.one == "a list of callables" else "correct it"
                raise SamplingError(f"{name}: expected {kind}, got {shown(value)}; {remedy}")
            if kind.least is not None and not kind.least <= value <= kind.most:
                within = f"of at least {kind.least}" if kind.most == math.inf else f"from {kind.least} to {kind.most}"
                raise SamplingError(f"{name}: expected a number {within}, got {value}; correct it", param=name)
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(31))
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise SamplingError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}; raise it")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 1:
            raise SamplingError(
                f"max_draft_tokens: expected at least 1, got {self.max_draft_tokens}; to draft nothing, set "
                "use_speculation=False"
            )
        if self.logit_bias:
            _check_bias(self.logit_bias)
        if self.ignore_eos and self.structured_outputs is not None:
            raise SamplingError(
                "ignore_eos: expected False with structured_outputs, which end with an eos id, got True; omit one "
                "of them",
                param="ignore_eos",
            )

    @classmethod
    def asked(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build parameters for commands and experiments, where a temperature of 0 is greedy decoding."""
        return cls(do_sample=values.get("temperature", 0) != 0, **values)

    @classmethod
    def asked_names(cls) -> tuple[str, ...]:
        """Names of the fields that commands, experiments and HTTP have."""
        return tuple(one.name for one in fields(cls) if one.metadata["help"] is not None)

    def check(self) -> None:
        """Raise SamplingError for a value that no request can be made with, whatever its target."""
        self.sampling_of(0)
        StopStrings.of(self.stop_strings)
        _check_processors(self.repetition_penalty, self.no_repeat_ngram_size)

    @classmethod
    def merge(
        cls, params: SamplingParams | None, overrides: Mapping[str, Any], *, sequence_length: int | None = None
    ) -> SamplingParams:
        """Return ``params`` with some fields replaced; None means the defaults.

        Raises:
            SamplingError: a keyword that does not exist, or a wrong value.
        """
        if params is not None and not isinstance(params, cls):
            raise SamplingError(
                f"params: expected SamplingParams, got a {type(params).__name__}; pass SamplingParams, or only keywords"
            )
        if sequence_length is not None:
            overrides = {**overrides, "sequence_length": sequence_length}
        for name in overrides:
            if name not in cls.__dataclass_fields__:
                names = ", ".join(cls.__dataclass_fields__)
                raise SamplingError(f"{name}: not a sampling parameter; use one of {names}")
        if params is None:
            return cls(**overrides)
        return replace(params, **overrides) if overrides else params

    @classmethod
    def in_process_fields(cls) -> frozenset[str]:
        """Fields that hold objects of this process and cannot be sent to another one."""
        return frozenset(one.name for one in fields(cls) if one.metadata["in_process"])

    def sampling_of(self, row: int, copy: int = 0) -> Sampling:
        """Return the sampling of one continuation of a prompt; a greedy one has its other values checked, too."""
        assert self.seed is not None, "it was drawn when this was made"
        if isinstance(self.seed, Sequence):
            seed = row_seed(self.seed[row], copy)
        else:
            seed = row_seed(self.seed, row * self.n + copy)
        drawn = Sampling(
            temperature=self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=int(seed),
        )
        return drawn if self.do_sample else Sampling(seed=int(seed))

    def max_length(self, prompt: int, n_positions: int) -> int:
        """Return the maximum length of a sequence with ``prompt`` prompt tokens, prompt included.

        Raises:
            ContextError: the prompt leaves no position for a token.
            PromptError: more tokens are requested than there are positions.
        """
        limit = n_positions if self.sequence_length is None else self.sequence_length
        if limit > n_positions:
            raise PromptError(
                f"sequence_length: expected at most {n_positions}, the positions of this decoder (n_positions), got "
                f"{limit}; lower it, or load the decoder with more"
            )
        if prompt >= limit:
            raise ContextError(
                f"input_ids: expected a prompt shorter than {limit} positions, got {prompt} tokens; shorten it, "
                "raise sequence_length, or load the decoder with more n_positions"
            )
        return limit if self.max_new_tokens is None else min(limit, prompt + self.max_new_tokens)


def _check_processors(repetition_penalty: float | None, no_repeat_ngram_size: int | None) -> None:
    if repetition_penalty is not None and not 0 < repetition_penalty < math.inf:
        raise SamplingError(
            f"repetition_penalty: expected a positive number, got {repetition_penalty}; 1 switches it off"
        )
    if no_repeat_ngram_size is not None and no_repeat_ngram_size < 0:
        raise SamplingError(
            f"no_repeat_ngram_size: expected a positive number, got {no_repeat_ngram_size}; 0 switches it off"
        )


def processor_list(
    custom: Sequence[hf.LogitsProcessor] | None,
    *,
    repetition_penalty: float | None,
    no_repeat_ngram_size: int | None,
) -> hf.LogitsProcessorList | None:
    """Hugging Face logits processors in the order `generate` applies them: penalties first, then the user's own; None
    if there is nothing to do.

    Their module is imported in this function: it takes half of PyTorch's import time.
    """
    if not custom and repetition_penalty in (None, 1.0) and not no_repeat_ngram_size:
        return None
    _check_processors(repetition_penalty, no_repeat_ngram_size)
    from transformers.generation import logits_process as hf

    processors = hf.LogitsProcessorList()
    if repetition_penalty is not None and repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if no_repeat_ngram_size:
        processors.append(hf.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    processors.extend(custom or ())
    return processors


@cache
def _kinds() -> list[tuple[str, _Kind]]:
    return [(one.name, kind) for one in fields(SamplingParams) if (kind := one.metadata["kind"]) is not None]


def _check_bias(bias: Mapping[int, float]) -> None:
    for token, value in bias.items():
        if not -_MOST_BIAS <= value <= _MOST_BIAS:
            raise SamplingError(
                f"logit_bias: expected values from -{_MOST_BIAS} to {_MOST_BIAS}, got {value} for id {token}; "
                "correct it",
                param="logit_bias",
            )


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor, without importing PyTorch: before that import there are none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _fits_a_float(value: Real) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def shown(value: object) -> str:
    if is_tensor(value):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
