"""Requests, made from the values of a call. Every invalid value is rejected before any work.

`paceline.engine.sampling_params` defines the values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Union

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ConfigurationError, PromptError, SamplingError
from paceline.core.protocols import Processor
from paceline.core.sampling import Sampling
from paceline.engine.sampling_params import Criterion, SamplingParams, is_tensor, processor_list, shown
from paceline.text.stop_strings import StopStrings
from paceline.text.structured_output import Grammar, GrammarCompiler, StructuredOutput

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InputIds", "Request", "SamplingParams", "TargetLimits"]

InputIds = Union["Tensor", Sequence[Sequence[int]]]

_LOGITS_FIELDS: dict[str, object] = {
    "logits_processor": None, "repetition_penalty": None, "no_repeat_ngram_size": None, "presence_penalty": 0,
    "frequency_penalty": 0, "logit_bias": None, "min_tokens": 0, "structured_outputs": None,
}  # fmt: skip
"""Fields of `SamplingParams` that change logits, with their neutral values."""


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """Limits of a target for requests: size of its vocabulary, longest sequence, and default stop ids.

    sampling_refusal    reason why it takes greedy requests only, with a remedy; None = it takes all
    host_refusal        reason why it takes no request whose tokens are decided on the host
    prediction_refusal  reason why it takes no prediction
    grammars            compiles grammars for its vocabulary
    drafters            names of the drafters that a request may choose from
    """

    vocab_size: int
    n_positions: int
    eos_token_ids: tuple[int, ...]
    sampling_refusal: str | None = None
    host_refusal: str | None = None
    prediction_refusal: str | None = None
    grammars: GrammarCompiler | None = None
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """Logits rules of one request.

    processor          Hugging Face logits processors, as one
    presence_penalty   subtracted from the logit of every token in the output
    frequency_penalty  the same, for each occurrence
    logit_bias         token id -> added to its logit
    min_tokens         minimum of output tokens before an eos id, unless the grammar forces one
    grammar            constraint on the output
    eos                ids that stop the sequence
    """

    processor: Processor | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    grammar: Grammar | None = None
    eos: frozenset[int] = frozenset()

    @property
    def idle(self) -> bool:
        numbers = self.presence_penalty or self.frequency_penalty or (self.min_tokens and self.eos)
        return self.processor is None and self.grammar is None and not self.logit_bias and not numbers


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue.

    index            its position in the call
    max_length       of the sequence in tokens, prompt included
    eos              ids that stop the sequence and stay in it
    stop_strings     strings that stop it; the token that completes one stays in it
    tokenizer        turns ids into text; needed for ``stop_strings``
    criteria         Hugging Face's stopping criteria
    use_speculation  whether tokens are drafted for it
    max_draft_tokens maximum number of drafted tokens verified in a round; None = all
    drafter          name of the one drafter that proposes for it; None = all
    rules            processing of its logits on the host; None = nothing
    output_scores    whether to report log-probabilities in the processed logits
    num_logprobs     number of the model's most likely tokens to report at each position; None = no log-probabilities
    num_prompt_logprobs   the same of the prompt's tokens
    prediction       expected ids of its output
    """

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_length: int
    eos: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None
    tokenizer: Decodes | None = None
    criteria: tuple[Criterion, ...] = ()
    use_speculation: bool = True
    rules: LogitsRules | None = None
    output_scores: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    max_draft_tokens: int | None = None
    drafter: str | None = None

    @property
    def most_drafted(self) -> int:
        """Most drafted tokens of a round, as far as the request says."""
        if not self.use_speculation:
            return 0
        return sys.maxsize if self.max_draft_tokens is None else self.max_draft_tokens

    @property
    def on_host(self) -> bool:
        return self.rules is not None or self.output_scores or self.num_logprobs is not None

    @classmethod
    def batch(
        cls,
        input_ids: InputIds,
        params: SamplingParams,
        limits: TargetLimits,
        *,
        attention_mask: Tensor | None = None,
    ) -> list[Request]:
        """Checked requests, in row order.

        input_ids       LongTensor [B, S], or lists of ids of unequal lengths
        attention_mask  [B, S], 0 where ``input_ids`` is padding (left or right); without it every id is real

        Raises:
            PromptError, ContextError, SamplingError: a request cannot be served.
        """
        rows = _prompts(input_ids, attention_mask, vocab_size=limits.vocab_size)
        _check_lists_and_drafter(params, len(rows), limits.drafters)
        stop_strings = None if params.stop_strings is None else _stop_strings(params)
        end_ids = _end_ids(params, limits)
        criteria = tuple(params.stopping_criteria_list or ())
        changed = any(getattr(params, name) != unset for name, unset in _LOGITS_FIELDS.items())
        rules = _rules(params, limits, end_ids) if changed else None
        prediction = _prediction(params, limits) if params.prediction else ()
        requests: list[Request] = []
        for index, prompt in enumerate(rows):
            length, asked = params.max_length(len(prompt), limits.n_positions), params.use_speculation
            speculation = asked if isinstance(asked, bool) else asked[index]
            for copy in range(params.n):
                sampling = params.sampling_of(index, copy)
                if limits.sampling_refusal is not None and sampling.temperature > 0:
                    raise SamplingError(limits.sampling_refusal, param="temperature")
                requests.append(
                    cls(
                        len(requests),
                        prompt,
                        sampling,
                        length,
                        end_ids,
                        stop_strings,
                        params.tokenizer,
                        criteria,
                        use_speculation=speculation,
                        rules=rules,
                        output_scores=params.output_scores,
                        num_logprobs=params.logprobs,
                        num_prompt_logprobs=params.prompt_logprobs,
                        prediction=prediction,
                        max_draft_tokens=params.max_draft_tokens,
                        drafter=params.drafter,
                    )
                )
        if limits.host_refusal is not None and requests[0].on_host:
            raise ConfigurationError(limits.host_refusal)
        return requests


def _check_lists_and_drafter(params: SamplingParams, count: int, drafters: Sequence[str]) -> None:
    for name in ("use_speculation", "seed"):
        value = getattr(params, name)
        if isinstance(value, (list, tuple)) and len(value) != count:
            raise SamplingError(f"{name}: expected {count} entries, got {len(value)}; give one per prompt")
    if params.drafter is not None and params.drafter not in drafters:
        names = ", ".join(map(repr, drafters))
        there = f"one of {names}" if names else "none, since the draft is no choice of several"
        raise SamplingError(f"drafter: expected {there}, got {params.drafter!r}; correct or omit it", param="drafter")


def _end_ids(params: SamplingParams, limits: TargetLimits) -> frozenset[int]:
    eos, ids = params.eos_token_id, limits.eos_token_ids
    if eos is not None:
        ids = tuple(map(int, eos if isinstance(eos, Sequence) else (eos,)))
        _check_ids("eos_token_id", ids, limits, remedy="give ids of this model's tokenizer, or ignore_eos")
    return frozenset() if params.ignore_eos else frozenset(ids)


def _stop_strings(params: SamplingParams) -> StopStrings | None:
    stop_strings = StopStrings.of(params.stop_strings)
    if stop_strings is not None and not hasattr(params.tokenizer, "decode"):
        raise SamplingError("stop_strings: expected a tokenizer that decodes, got none; pass tokenizer=...")
    return stop_strings


def _check_ids(name: str, ids: Iterable[int], limits: TargetLimits, *, remedy: str) -> None:
    if (bad := next((token for token in ids if not 0 <= token < limits.vocab_size), None)) is not None:
        size = limits.vocab_size
        raise SamplingError(f"{name}: expected ids of the vocabulary of {size}, got {bad}; {remedy}", param=name)


def _rules(params: SamplingParams, limits: TargetLimits, eos: frozenset[int]) -> LogitsRules | None:
    processor: Processor | None = processor_list(  # type: ignore[assignment]  # its call is annotated wider
        params.logits_processor,
        repetition_penalty=params.repetition_penalty,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
    )
    bias = dict(params.logit_bias or {})
    for name, ids in (("logit_bias", bias), ("eos_token_id", eos if params.min_tokens else ())):
        _check_ids(name, ids, limits, remedy="give ids of this model's tokenizer")
    rules = LogitsRules(
        processor,
        float(params.presence_penalty),
        float(params.frequency_penalty),
        bias,
        params.min_tokens,
        None if params.structured_outputs is None else _grammar(params.structured_outputs, params, limits, eos=eos),
        eos,
    )
    return None if rules.idle else rules


def _grammar(output: StructuredOutput, params: SamplingParams, limits: TargetLimits, *, eos: frozenset[int]) -> Grammar:
    eos = frozenset(token for token in eos if 0 <= token < limits.vocab_size)
    wrong = None
    if params.tokenizer is None:
        wrong = "a fast Hugging Face tokenizer with it, got none; pass tokenizer=..."
    elif not eos:
        wrong = "an eos id to end with, got none; give eos_token_id"
    elif limits.grammars is None:
        wrong = "a target that supports grammars, got another; decode with SpeculativeGenerator"
    if wrong is not None:
        raise SamplingError(f"structured_outputs: expected {wrong}", param="structured_outputs")
    assert limits.grammars is not None
    return limits.grammars.compile(output, params.tokenizer, eos=eos)


def _prediction(params: SamplingParams, limits: TargetLimits) -> tuple[int, ...]:
    assert params.prediction
    if limits.prediction_refusal is not None:
        raise ConfigurationError(limits.prediction_refusal)
    if not isinstance(params.prediction, str):
        return tuple(params.prediction)
    encode = getattr(params.tokenizer, "encode", None)
    if encode is None:
        raise SamplingError(
            "prediction: expected ids, or text with a tokenizer that has encode(text), got text without one; pass "
            "tokenizer=..., or ids",
            param="prediction",
        )
    return tuple(encode(params.prediction, add_special_tokens=False))


def _prompts(input_ids: InputIds, attention_mask: Tensor | None, *, vocab_size: int) -> list[tuple[int, ...]]:
    if is_tensor(input_ids):
        import torch

        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise PromptError(
                f"input_ids: expected an integer tensor [B, S], got {input_ids.dtype} of shape "
                f"{list(input_ids.shape)}; correct it"
            )
        rows: list[list[int]] = input_ids.tolist()
    else:
        rows = _rows_of_ids(input_ids)
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    if not rows:
        raise PromptError(
            "input_ids: expected a LongTensor [B, S] or a list of lists of ids, got no prompt; give at least one"
        )
    for index, row in enumerate(rows):
        if not row:
            raise PromptError(
                f"input_ids: expected at least one token, got an empty prompt {index}; give for example the bos id"
            )
        if min(row) < 0 or max(row) >= vocab_size:
            bad = next(token for token in row if not 0 <= token < vocab_size)
            raise PromptError(
                f"input_ids: expected ids of the vocabulary of {vocab_size}, got {bad} in prompt {index}; use the "
                "model's own tokenizer, or give an attention_mask for padding"
            )
    return [tuple(row) for row in rows]


def _rows_of_ids(value: object) -> list[list[int]]:
    if hasattr(value, "keys"):
        raise PromptError(
            "input_ids: expected a LongTensor [B, S] or a list of lists of ids, got a mapping, as tokenizers return "
            "it; pass encoding['input_ids']"
        )
    rows = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
    if rows is None or not all(isinstance(row, (list, tuple)) for row in rows):
        raise PromptError(
            f"input_ids: expected a LongTensor [B, S] or a list of lists of ids, got {shown(value)}; turn text into "
            "ids first, and put the ids of a single prompt into a list"
        )
    for index, row in enumerate(rows):
        for token in row:
            if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
                raise PromptError(
                    f"input_ids: expected integers, got {token!r} in prompt {index}; turn text into ids first"
                )
    return [list(map(int, row)) for row in rows]


def _unpadded(rows: list[list[int]], mask: Tensor) -> list[list[int]]:
    if not is_tensor(mask) or mask.dim() != 2:
        raise PromptError(f"attention_mask: expected a tensor [B, S] like input_ids, got {shown(mask)}; correct it")
    marks = mask.tolist()
    if [len(row) for row in marks] != [len(row) for row in rows]:
        raise PromptError(f"attention_mask: expected the shape of input_ids, got {list(mask.shape)}; correct it")
    unpadded = []
    for index, (row, marks_of_row) in enumerate(zip(rows, marks, strict=True)):
        places = [i for i, mark in enumerate(marks_of_row) if mark]
        if places and places[-1] - places[0] + 1 != len(places):
            raise PromptError(
                f"attention_mask: expected padding only at the ends, got a hole in prompt {index}; remove it"
            )
        unpadded.append([row[i] for i in places])
    return unpadded
