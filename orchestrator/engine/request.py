"""What a call asks for: `SamplingParams`, and the requests made of them. Everything is refused here, before any work.

The keywords of `sample` are the fields of `SamplingParams`, and nowhere written again: commands, HTTP and workers
build the same value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ContextError, PromptError, SamplingError
from paceline.core.protocols import Processor
from paceline.core.sampling import Sampling, row_seed
from paceline.engine import validation
from paceline.engine.stopping import Criterion, Stopping
from paceline.text.processors import processor_list
from paceline.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers.generation.logits_process import LogitsProcessor

InputIds = Tensor | Sequence[Sequence[int]]

_IN_PROCESS = {"in_process": True}  # objects that stay in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a call samples and when its texts end; the names are those of Hugging Face's `generate`.

    sequence_length         most tokens of a text, prompt included; the smaller of this and ``max_new_tokens`` holds
    max_new_tokens          most tokens behind the prompt; default: as many as the decoder has positions for
    do_sample               False (default): greedy, whatever the next four say
    temperature, top_k, top_p, min_p   as in Hugging Face; None switches a filter off. Equal logits at the border of
                            top-k stand together, so ``top_k=1`` draws among equal ones at the top: it is not greedy
    seed                    row 0 draws with it, row b with a hash of it and b; or one seed for every row
    eos_token_id            ids that end a text; default: the checkpoint's; [] for none
    pad_token_id            fills shorter rows of the result; default: the checkpoint's, else its first eos id, else 0
    stop_strings            texts that end a text, as Hugging Face's; need ``tokenizer``; `StopStrings` says more
    stopping_criteria_list  Hugging Face criteria, called once per new token with ids [1, length]
    logits_processor        Hugging Face processors, called once per decided token, on the host
    no_repeat_ngram_size, repetition_penalty   as in Hugging Face; they run as processors
    output_scores           also give the log-probability of every new token
    use_speculation         False, or one entry for every prompt: draft nothing for it
    max_draft_tokens        most drafted tokens of a round that are verified; None = as many as the drafter proposes
    verify_width            rows of the verifying graph, at least k + 1; to compare runs at equal width

    Raises:
        SamplingError: a value has the wrong type or is out of range.
    """

    sequence_length: int | None = None
    max_new_tokens: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | Sequence[int] = 0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    stop_strings: str | Sequence[str] | StopStrings | None = None
    tokenizer: Decodes | None = field(default=None, metadata=_IN_PROCESS)
    stopping_criteria_list: Sequence[Criterion] | None = field(default=None, metadata=_IN_PROCESS)
    logits_processor: Sequence[LogitsProcessor] | None = field(default=None, metadata=_IN_PROCESS)
    no_repeat_ngram_size: int | None = None
    repetition_penalty: float | None = None
    output_scores: bool = False
    use_speculation: bool | Sequence[bool] = True
    max_draft_tokens: int | None = None
    verify_width: int | None = None

    def __post_init__(self) -> None:
        validation.check_types(self, _KINDS)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise SamplingError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.max_draft_tokens is not None and self.max_draft_tokens < 1:
            raise SamplingError(
                f"max_draft_tokens must be at least 1, not {self.max_draft_tokens}; to draft nothing, give "
                "use_speculation=False"
            )

    @classmethod
    def merge(
        cls, params: SamplingParams | None, overrides: Mapping[str, Any], *, sequence_length: int | None = None
    ) -> SamplingParams:
        """``params`` with some fields replaced; None stands for the defaults.

        Raises:
            SamplingError: a keyword that does not exist, or a wrong value.
        """
        if params is not None and not isinstance(params, cls):
            raise SamplingError(f"params is a {type(params).__name__}; give SamplingParams, or keywords alone")
        if sequence_length is not None:
            overrides = {**overrides, "sequence_length": sequence_length}
        for name in overrides:
            if name not in cls.__dataclass_fields__:
                names = ", ".join(cls.__dataclass_fields__)
                raise SamplingError(f"{name!r} is no sampling parameter; there are {names}")
        if params is None:
            return cls(**overrides)
        return replace(params, **overrides) if overrides else params

    @property
    def on_host(self) -> bool:
        """Whether every token has to be decided on the host."""
        penalty = self.repetition_penalty not in (None, 1.0)
        return bool(self.logits_processor or penalty or self.no_repeat_ngram_size or self.output_scores)

    @classmethod
    def in_process_fields(cls) -> frozenset[str]:
        """Fields that hold objects of this process and cannot be sent to another one."""
        return frozenset(one.name for one in fields(cls) if one.metadata == _IN_PROCESS)

    def sampling_of(self, row: int) -> Sampling:
        """How one row draws. All values are checked, also where the row is greedy and none of them is used."""
        seed = self.seed[row] if isinstance(self.seed, Sequence) else row_seed(self.seed, row)
        drawn = Sampling(
            temperature=self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=int(seed),
        )
        return drawn if self.do_sample else Sampling(seed=int(seed))

    def max_length(self, prompt: int, n_positions: int) -> int:
        """How long a text with a prompt of so many tokens may become, prompt included.

        Raises:
            ContextError: the prompt leaves no room for a token.
            PromptError: more is asked for than there is.
        """
        limit = n_positions if self.sequence_length is None else self.sequence_length
        if limit > n_positions:
            raise PromptError(
                f"sequence_length={limit} is more than the {n_positions} positions this decoder was loaded with "
                "(n_positions); ask for less or load it with more"
            )
        if prompt >= limit:
            raise ContextError(
                f"a prompt of {prompt} tokens leaves no room in {limit} positions; shorten it, raise "
                "sequence_length, or load the decoder with more n_positions"
            )
        return limit if self.max_new_tokens is None else min(limit, prompt + self.max_new_tokens)


_KINDS: dict[str, validation.Kind] = {
    "sequence_length": validation.Kind("an integer", optional=True),
    "max_new_tokens": validation.Kind("an integer", optional=True),
    "do_sample": validation.Kind("True or False"),
    "temperature": validation.Kind("a number"),
    "top_k": validation.Kind("an integer", optional=True),
    "top_p": validation.Kind("a number", optional=True),
    "min_p": validation.Kind("a number", optional=True),
    "seed": validation.Kind("an integer", listed=True),
    "eos_token_id": validation.Kind("an integer", optional=True, listed=True),
    "pad_token_id": validation.Kind("an integer", optional=True),
    "stop_strings": validation.Kind("a string", optional=True, listed=True, also=StopStrings),
    "stopping_criteria_list": validation.Kind("a list of callables", optional=True),
    "logits_processor": validation.Kind("a list of callables", optional=True),
    "no_repeat_ngram_size": validation.Kind("an integer", optional=True),
    "repetition_penalty": validation.Kind("a number", optional=True),
    "output_scores": validation.Kind("True or False"),
    "use_speculation": validation.Kind("True or False", listed=True),
    "max_draft_tokens": validation.Kind("an integer", optional=True),
}


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """What a target can take: size of its vocabulary, longest text, and the ids that end one by default.

    ``sampling_refusal``: why it takes greedy requests alone, with what to do; None = it takes all.
    """

    vocab_size: int
    n_positions: int
    eos_token_ids: tuple[int, ...]
    sampling_refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue.

    index            its place in the call
    use_speculation  whether anything is drafted for it
    max_draft_tokens most drafted tokens of a round that are verified; None = as many as there are
    processor        Hugging Face logits processors, as one; they run on the host
    output_scores    whether log-probabilities are wanted
    """

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    use_speculation: bool = True
    processor: Processor | None = None
    output_scores: bool = False
    max_draft_tokens: int | None = None

    @property
    def most_drafted(self) -> int:
        """Most drafted tokens of a round, as far as the request says."""
        if not self.use_speculation:
            return 0
        return sys.maxsize if self.max_draft_tokens is None else self.max_draft_tokens

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
            PromptError, ContextError, SamplingError: something cannot be served.
        """
        rows = _prompts(input_ids, attention_mask, vocab_size=limits.vocab_size)
        for name in ("use_speculation", "seed"):
            value = getattr(params, name)
            if isinstance(value, (list, tuple)) and len(value) != len(rows):
                raise SamplingError(
                    f"{name} has {len(value)} entries for {len(rows)} prompts; give one for each, or a single value"
                )
        stop_strings = None
        if params.stop_strings:
            stop_strings = StopStrings.of(params.stop_strings)
            if not hasattr(params.tokenizer, "decode"):
                raise SamplingError(
                    "stop_strings need the tokenizer: pass tokenizer=..., which has a method decode(ids)"
                )
        eos = params.eos_token_id
        eos_ids = limits.eos_token_ids if eos is None else eos if isinstance(eos, Sequence) else (eos,)
        processor: Processor | None = None
        if params.on_host:
            processor = processor_list(  # type: ignore[assignment]  # its call is annotated wider
                params.logits_processor,
                repetition_penalty=params.repetition_penalty,
                no_repeat_ngram_size=params.no_repeat_ngram_size,
            )
        criteria, end_ids = tuple(params.stopping_criteria_list or ()), frozenset(map(int, eos_ids))
        requests = []
        for index, prompt in enumerate(rows):
            length = params.max_length(len(prompt), limits.n_positions)
            stopping = Stopping(length, end_ids, stop_strings, params.tokenizer, criteria)
            sampling, speculation = params.sampling_of(index), params.use_speculation
            if limits.sampling_refusal is not None and sampling.temperature > 0:
                raise SamplingError(limits.sampling_refusal, param="temperature")
            if not isinstance(speculation, bool):
                speculation = speculation[index]
            requests.append(
                cls(
                    index,
                    prompt,
                    sampling,
                    stopping,
                    use_speculation=speculation,
                    processor=processor,
                    output_scores=params.output_scores,
                    max_draft_tokens=params.max_draft_tokens,
                )
            )
        return requests


def _prompts(input_ids: InputIds, attention_mask: Tensor | None, *, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts as tuples of ids, without padding."""
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise PromptError(
                f"input_ids must be an integer tensor [B, S], not {input_ids.dtype} of shape {list(input_ids.shape)}"
            )
        rows: list[list[int]] = input_ids.tolist()
    else:
        rows = validation.rows_of_ids(input_ids)
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    if not rows:
        raise PromptError("input_ids holds no prompt; give a LongTensor [B, S] or a list of lists of ids")
    for index, row in enumerate(rows):
        if not row:
            raise PromptError(f"prompt {index} is empty; give at least one token, such as the bos id")
        if min(row) < 0 or max(row) >= vocab_size:
            bad = next(token for token in row if not 0 <= token < vocab_size)
            raise PromptError(
                f"prompt {index} holds id {bad}, outside the vocabulary of {vocab_size}; was it made by another "
                "tokenizer, or padded without an attention_mask?"
            )
    return [tuple(row) for row in rows]


def _unpadded(rows: list[list[int]], mask: Tensor) -> list[list[int]]:
    validation.mask(mask)
    marks = mask.tolist()
    if [len(row) for row in marks] != [len(row) for row in rows]:
        raise PromptError(f"attention_mask of shape {list(mask.shape)} does not fit input_ids")
    unpadded = []
    for index, (row, kept) in enumerate(zip(rows, marks, strict=True)):
        places = [i for i, mark in enumerate(kept) if mark]
        if places and places[-1] - places[0] + 1 != len(places):
            raise PromptError(f"attention_mask of prompt {index} has a hole; only padding at its ends can be left out")
        unpadded.append([row[i] for i in places])
    return unpadded
