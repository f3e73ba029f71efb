"""Hugging Face's `StoppingCriteria`, called once for every committed token with the growing prefix, as plain decoding
would call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.errors import SamplingError
from paceline.outputs import FinishReason

Criterion = Callable[..., object]
"""Hugging Face's interface: (ids [1, length] int64, scores or None) -> bool or bool tensor [1]."""


def stopped_by(criteria: Sequence[Criterion], text: Sequence[int]) -> FinishReason | None:
    """Return why a text stops by the first criterion that says so; None = none does."""
    import torch

    ids = torch.tensor([text])
    for criterion in criteria:
        try:
            verdict = criterion(ids, None)
        except (TypeError, AttributeError) as error:
            if "NoneType" not in str(error):
                raise
            name = getattr(criterion, "__qualname__", type(criterion).__name__)
            raise SamplingError(
                f"stopping_criteria_list: {name} reads scores, which criteria do not receive (None, as in `generate` "
                "without output_scores); use criteria that read only the ids",
                param="stopping_criteria_list",
            ) from error
        if bool(verdict.all()) if isinstance(verdict, torch.Tensor) else bool(verdict):
            return _reason_of(criterion)
    return None


def _reason_of(criterion: Criterion) -> FinishReason:
    """Hugging Face's own criteria for length and time are named as such."""
    from transformers.generation import stopping_criteria as hf  # slow to import, and seldom needed

    if isinstance(criterion, hf.MaxTimeCriteria):
        return "time"
    if isinstance(criterion, hf.MaxLengthCriteria):
        return "length"
    if isinstance(criterion, (hf.StopStringCriteria, hf.EosTokenCriteria)):
        return "stop"
    return "criteria"
