"""Hugging Face logits processors: the list a request asks for, in the order `generate` applies them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.generation import logits_process as hf

from paceline.core.errors import SamplingError


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
    made = hf.LogitsProcessorList()
    if repetition_penalty is not None and repetition_penalty != 1.0:
        if repetition_penalty <= 0:
            raise SamplingError(f"repetition_penalty must be positive, not {repetition_penalty}; 1 switches it off")
        made.append(hf.RepetitionPenaltyLogitsProcessor(float(repetition_penalty)))
    if no_repeat_ngram_size:
        if no_repeat_ngram_size < 0:
            raise SamplingError(f"no_repeat_ngram_size must be positive, not {no_repeat_ngram_size}")
        made.append(hf.NoRepeatNGramLogitsProcessor(no_repeat_ngram_size))
    made.extend(custom or ())
    return made or None
