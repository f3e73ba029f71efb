"""Stop conditions of a sequence: every token is checked, in order, so that the earliest reason wins.

Hugging Face's `StoppingCriteria` are called once for every committed token with the growing prefix, as plain decoding
would call them. The search for stop strings is in `paceline.text.stop_strings`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dis import get_instructions
from inspect import isfunction
from typing import TYPE_CHECKING

from paceline.core.errors import SamplingError
from paceline.outputs import FinishReason
from paceline.text.stop_strings import StopStringFilter

if TYPE_CHECKING:
    from paceline.engine.request import Request

Criterion = Callable[..., object]
"""Hugging Face's interface: (ids [1, length] int64, scores or None) -> bool or bool tensor [1]."""


class StopChecker:
    """Tracks one sequence and finds where it stops.

    text               prompt and all tokens so far
    checks_each_token  whether every single token must be checked to find the stop
    """

    def __init__(self, request: Request) -> None:
        self.request, self.text = request, list(request.prompt)
        self._filter: StopStringFilter | None = None
        if request.stop_strings is not None and request.tokenizer is not None:
            self._filter = StopStringFilter(request.stop_strings, request.tokenizer, request.prompt)
        self.checks_each_token = self._filter is not None or bool(request.criteria)
        self._appended = 0  # tokens added by `append` since the last `extend`, and the stop reason among them
        self._reason: FinishReason | None = None

    @property
    def remaining(self) -> int:
        """Maximum number of tokens that may still come."""
        return self.request.max_length - len(self.text)

    def append(self, token: int) -> FinishReason | None:
        """Add a token; return the reason if the sequence stops with it.

        A verifier that decides a round token by token calls this for each; `extend` then receives the same tokens.
        """
        self.text.append(token)
        self._appended += 1
        self._reason = reason = self._reason_to_end(token)
        return reason

    def extend(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """Add the tokens of a commit, up to the one that stops the sequence.

        -> number of tokens that were appended, and the reason if it stops.
        """
        request = self.request
        if self._appended:
            count = self.take_appended()
            assert self.text[-count:] == list(tokens[:count]), "another text was checked than was committed"
            return count, self._reason
        if (
            not self.checks_each_token
            and len(self.text) + len(tokens) < request.max_length
            and request.eos.isdisjoint(tokens)
        ):
            self.text += tokens
            return len(tokens), None
        for count, token in enumerate(tokens, start=1):
            self.text.append(token)
            reason = self._reason_to_end(token)
            if reason is not None:
                return count, reason
        return len(tokens), None

    def take_appended(self) -> int:
        """Return how many tokens `append` has added since the last commit."""
        count, self._appended = self._appended, 0
        return count

    def _reason_to_end(self, token: int) -> FinishReason | None:
        """Return why the sequence stops with its last token, or None."""
        request = self.request
        if token in request.eos:
            return "stop"
        if self._filter is not None:
            self._filter.push(token)
            if self._filter.finished:
                return "stop"
        reason = self._criterion() if request.criteria else None
        return "length" if reason is None and len(self.text) >= request.max_length else reason

    def _criterion(self) -> FinishReason | None:
        import torch

        ids = torch.tensor([self.text])
        for criterion in self.request.criteria:
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
    """The refusal of a criterion that reads scores."""
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
