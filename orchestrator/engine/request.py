"""From the keywords a user writes to checked values: prompts, sampling, stopping. All refusals happen here, first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ContextError, PromptError, SamplingError
from paceline.core.sampling import Sampling
from paceline.engine import validation
from paceline.engine.stopping import Criterion, InNewText, Stopping, StopStrings

InputIds = Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Request:
    """One text to continue. ``index`` is its place in the call; ``use_speculation``: whether anything is drafted for
    it.
    """

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    use_speculation: bool = True


def prompts(input_ids: InputIds, attention_mask: Tensor | None, *, vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts as tuples of ids, padding left out.

    Raises:
        PromptError: no prompt, an empty one, a wrong type or shape, an id out of range.
    """
    validation.prompts(input_ids)
    validation.mask(attention_mask)
    rows = _rows(input_ids)
    if attention_mask is not None:
        rows = _unpadded(rows, attention_mask)
    if not rows:
        raise PromptError("input_ids holds no prompt; give a LongTensor [B, S] or a list of lists of ids")
    for index, row in enumerate(rows):
        if not row:
            raise PromptError(f"prompt {index} is empty; give at least one token, such as the bos id")
        bad = next((token for token in row if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise PromptError(
                f"prompt {index} holds id {bad}, outside the vocabulary of {vocab_size}; was it made by another "
                "tokenizer, or padded without an attention_mask?"
            )
    return [tuple(row) for row in rows]


def total_length(prompt: int, sequence_length: int | None, max_new_tokens: int | None, *, n_positions: int) -> int:
    """How long a text may become, prompt included.

    Raises:
        ContextError: the prompt leaves no room for a token.
        PromptError: more is asked for than there is.
        SamplingError: a limit is not positive.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise SamplingError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    if sequence_length is not None and sequence_length > n_positions:
        raise PromptError(
            f"sequence_length={sequence_length} is more than the {n_positions} positions this decoder was loaded with "
            "(n_positions); ask for less or load it with more"
        )
    limit = n_positions if sequence_length is None else sequence_length
    if prompt >= limit:
        raise ContextError(
            f"a prompt of {prompt} tokens leaves no room in {limit} positions; shorten it, raise "
            "sequence_length, or load the decoder with more n_positions"
        )
    return limit if max_new_tokens is None else min(limit, prompt + max_new_tokens)


def sampling(
    row: int,
    *,
    do_sample: bool,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | Sequence[int],
) -> Sampling:
    """Sampling of one row. An integer seed means seed + row, so that rows of a batch differ."""
    own = int(seed[row]) if isinstance(seed, Sequence) else int(seed) + row
    made = Sampling(  # also where it is greedy, and nothing of it is used: what is no value is a slip
        temperature=temperature,
        top_k=0 if top_k is None else top_k,
        top_p=1.0 if top_p is None else top_p,
        min_p=0.0 if min_p is None else min_p,
        seed=own,
    )
    return made if do_sample else Sampling(seed=own)


def stopping(
    length: int,
    *,
    eos: int | Sequence[int] | None,
    default_eos: Sequence[int],
    stop_strings: StopStrings,
    tokenizer: Decodes | None,
    criteria: Sequence[Criterion] | None,
) -> Stopping:
    """Stopping of one row.

    Raises:
        SamplingError: stop strings without a tokenizer, or one that no text can hold.
    """
    in_new_text = isinstance(stop_strings, InNewText)
    if isinstance(stop_strings, InNewText):
        stop_strings = stop_strings.strings
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings or ())
    if strings and not hasattr(tokenizer, "decode"):
        raise SamplingError("stop_strings need the tokenizer: pass tokenizer=..., which has a method decode(ids)")
    ids = default_eos if eos is None else eos if isinstance(eos, Sequence) else [eos]
    return Stopping(length, frozenset(map(int, ids)), strings, tokenizer, tuple(criteria or ()), in_new_text)


def _rows(input_ids: InputIds) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise PromptError(
                f"input_ids must be an integer tensor [B, S], not {input_ids.dtype} of shape {list(input_ids.shape)}"
            )
        return [[int(token) for token in row] for row in input_ids.tolist()]
    for index, row in enumerate(input_ids):
        bad = next((token for token in row if not validation.is_integer(token)), None)
        if bad is not None:
            raise PromptError(f"prompt {index} holds {bad!r}, which is not an integer; turn text into ids first")
    return [[int(token) for token in row] for row in input_ids]


def _unpadded(rows: list[list[int]], mask: Tensor) -> list[list[int]]:
    marks = mask.tolist()
    if [len(row) for row in marks] != [len(row) for row in rows]:
        raise PromptError(f"attention_mask of shape {list(mask.shape)} does not fit input_ids")
    found = []
    for index, (row, kept) in enumerate(zip(rows, marks, strict=True)):
        places = [i for i, mark in enumerate(kept) if mark]
        if places and places[-1] - places[0] + 1 != len(places):
            raise PromptError(f"attention_mask of prompt {index} has a hole; only padding at its ends can be left out")
        found.append([row[i] for i in places])
    return found
