"""Whether keywords have the right type, so that a slip is named before anything is computed with it.

Whether they are in range is said where they are used, and here where it is a matter of a least and a most.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal, TypeGuard

from paceline.core.errors import PromptError, SamplingError

if TYPE_CHECKING:
    from torch import Tensor

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
    "a StructuredOutput": lambda _value: False,  # but for the class that `Kind.also` names
}
_USUAL: dict[str, type] = {"True or False": bool, "an integer": int, "a number": float, "a string": str}
_MOST_BIAS = 100
_PLURALS = {"True or False": "truth values", "an integer": "integers", "a string": "strings"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a keyword may be.

    one       a value of it, as messages say it
    optional  None is possible
    listed    a list or tuple of such values is possible
    also      a class whose objects are possible
    least, most   of a number; None = any
    """

    one: Literal[
        "True or False",
        "an integer",
        "a number",
        "a string",
        "a list of callables",
        "a mapping of ids to numbers",
        "a string or a list of integers",
        "a StructuredOutput",
    ]
    optional: bool = False
    listed: bool = False
    also: type | None = None
    least: float | None = None
    most: float = math.inf

    def accepts(self, value: object) -> bool:
        """Whether a value is of this kind. NumPy's numbers are numbers, and truth values are none."""
        check = _CHECKS[self.one]
        if self.also is not None and isinstance(value, self.also):
            return True
        if self.listed and isinstance(value, (list, tuple)):
            return all(map(check, value))
        return check(value)

    def __str__(self) -> str:
        more = (f" or a list of {_PLURALS[self.one]}" if self.listed else "") + (" or None" if self.optional else "")
        return self.one + more


def check(params: object, kinds: Mapping[str, Kind]) -> None:
    """Raise SamplingError for the first field that is not of its kind."""
    for name, kind in kinds.items():
        value = getattr(params, name)
        if value is None and kind.optional:
            continue
        # Most values are plain, and asking abstract classes takes a microsecond each.
        if type(value) is not _USUAL.get(kind.one) and not kind.accepts(value):
            single = "; put a single one into a list" if kind.one == "a list of callables" else ""
            raise SamplingError(f"{name} must be {kind}, not {_shown(value)}{single}")
        least, most = kind.least, kind.most
        if least is not None and not least <= value <= most:
            within = f"at least {least}" if most == math.inf else f"within {least} and {most}"
            raise SamplingError(f"{name} must be {within}, not {value}", param=name)


def check_bias(bias: Mapping[int, float]) -> None:
    """Raise SamplingError for a bias that is not within -100 and 100, as OpenAI's API has it."""
    for token, value in bias.items():
        if not -_MOST_BIAS <= value <= _MOST_BIAS:
            raise SamplingError(
                f"logit_bias of id {token} must be within -{_MOST_BIAS} and {_MOST_BIAS}, not {value}",
                param="logit_bias",
            )


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor. Nobody has one who has not imported PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def mask(value: object) -> None:
    """Raise PromptError unless it is a tensor of two dimensions."""
    if not is_tensor(value) or value.dim() != 2:
        raise PromptError(f"attention_mask must be a tensor [B, S], as input_ids, not {_shown(value)}")


def rows_of_ids(value: object) -> list[list[int]]:
    """Prompts from a sequence of sequences of ids.

    Raises:
        PromptError: it is something else, or holds something that is no integer.
    """
    if hasattr(value, "keys"):
        raise PromptError("input_ids is a mapping, as tokenizers return it; pass its entry: encoding['input_ids']")
    rows = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None
    if rows is None or not all(isinstance(row, (list, tuple)) for row in rows):
        raise PromptError(
            f"input_ids must be a LongTensor [B, S] or a list of lists of ids, not {_shown(value)}; turn text into ids "
            "first, and put the ids of a single text into a list"
        )
    for index, row in enumerate(rows):
        for token in row:
            if type(token) is not int and not _CHECKS["an integer"](token):
                raise PromptError(f"prompt {index} holds {token!r}, which is not an integer; turn text into ids first")
    return [list(map(int, row)) for row in rows]


def _fits_a_float(value: Real) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(value: object) -> str:
    if is_tensor(value):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
