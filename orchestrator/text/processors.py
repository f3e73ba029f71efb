"""Hugging Face logits processors: the list a request asks for, in the order `generate` applies them.

Their module is imported when one is asked for: it takes as long as half of PyTorch, and every worker would wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.errors import SamplingError

if TYPE_CHECKING:
    from transformers.generation import logits_process as hf


def check(repetition_penalty: float | None, no_repeat_ngram_size: int | None) -> None:
    """Raise SamplingError if a value is out of range."""
    if repetition_penalty is not None and not 0 < repetition_penalty < math.inf:
        raise SamplingError(f"repetition_penalty must be positive, not {repetition_penalty}; 1 switches it off")
    if no_repeat_ngram_size is not None and no_repeat_ngram_size < 0:
        raise SamplingError(f"no_repeat_ngram_size must be positive, not {no_repeat_ngram_size}")


def processor_list(
    custom: Sequence[hf.LogitsProcessor] | None,
    *,
    repetition_penalty: float | None,
    no_repeat_ngram_size: int | None,
) -> hf.LogitsProcessorList | None:
    """Penalties first, then the user's own; None if there is nothing to do.

    Raises:
        SamplingError: a value is out of range.
    """
    if not custom and repetition_penalty in (None, 1.0) and not no_repeat_ngram_size:
        return None
    check(repetition_penalty, no_repeat_ngram_size)
    from transformers.generation import logits_process as hf

    processors = hf.LogitsProcessorList()
    if repetition_penalty is not None and repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if no_repeat_ngram_size:
        processors.append(hf.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    processors.extend(custom or ())
    return processors
