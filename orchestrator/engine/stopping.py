"""Hugging Face's `StoppingCriteria`, called once for every committed token with the growing prefix, as plain decoding
would call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dis import get_instructions
from inspect import isfunction

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
            if "NoneType" in str(error):
                raise no_scores(criterion) from error
            raise
        if bool(verdict.all()) if isinstance(verdict, torch.Tensor) else bool(verdict):
            return _reason_of(criterion)
    return None


def no_scores(criterion: Criterion) -> SamplingError:
    name = getattr(criterion, "__qualname__", type(criterion).__name__)
    return SamplingError(
        f"stopping_criteria_list: {name} reads scores, which criteria do not receive (None, as in `generate` "
        "without output_scores); use criteria that read only the ids",
        param="stopping_criteria_list",
    )


def reads_scores(criterion: Criterion) -> bool:
    """Whether a criterion written in Python reads its second argument without checking for None first.

    This is found in its bytecode, before anything is decoded. A criterion that only passes the scores on is not
    detected.
    """
    method = type(criterion).__dict__.get("__call__")
    code = getattr(criterion if isfunction(criterion) else method, "__code__", None)
    place = 1 if isfunction(criterion) else 2
    if code is None or code.co_argcount <= place:
        return False
    steps = [step for step in get_instructions(code) if step.opname not in ("CACHE", "RESUME", "EXTENDED_ARG")]
    name, reads = code.co_varnames[place], False
    for load, after, last in zip(steps, steps[1:], [*steps[2:], steps[-1]], strict=False):
        if load.opname.startswith("LOAD_FAST") and load.argval == name:
            if "NONE" in after.opname or last.opname == "IS_OP":
                return False
            subscript = last.opname == "BINARY_SUBSCR" or last.argrepr == "[]"
            reads |= after.opname in ("LOAD_ATTR", "LOAD_METHOD") or subscript
    return reads


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
