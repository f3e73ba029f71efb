"""Whether keywords have the right type, so that a slip is named before anything is computed with it.

Not whether they are in range: that is said where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real

from torch import Tensor

from paceline.core.errors import PromptError, SamplingError

Check = Callable[[str, object], None]
"""Takes a keyword's name and value; raises SamplingError for a wrong type."""


def check_types(params: object, checks: Mapping[str, Check]) -> None:
    """Run the check of every field."""
    for name, check in checks.items():
        check(name, getattr(params, name))


def integer(name: str, value: object) -> None:
    """None or an integer."""
    if value is not None and not is_integer(value):
        raise SamplingError(f"{name} must be an integer or None, not {_shown(value)}")


def number(name: str, value: object) -> None:
    """A number."""
    if not _is_number(value):
        raise SamplingError(f"{name} must be a number, not {_shown(value)}")


def optional_number(name: str, value: object) -> None:
    """None or a number."""
    if value is not None and not _is_number(value):
        raise SamplingError(f"{name} must be a number or None, not {_shown(value)}")


def integers(name: str, value: object) -> None:
    """An integer or a sequence of them."""
    if is_integer(value):
        return
    if not isinstance(value, (list, tuple)) or not all(is_integer(entry) for entry in value):
        raise SamplingError(f"{name} must be an integer or a list of them, not {_shown(value)}")


def optional_integers(name: str, value: object) -> None:
    """None, an integer or a sequence of them."""
    if value is not None:
        integers(name, value)


def strings(name: str, value: object) -> None:
    """None, a string, a sequence of strings, or a value that holds some."""
    value = getattr(value, "strings", value)
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
        raise SamplingError(f"{name} must be a string or a list of strings, not {_shown(value)}")


def flag(name: str, value: object) -> None:
    """A truth value."""
    if not isinstance(value, bool):
        raise SamplingError(f"{name} must be True or False, not {_shown(value)}")


def flags(name: str, value: object) -> None:
    """A truth value or a sequence of them."""
    if isinstance(value, bool):
        return
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, bool) for entry in value):
        raise SamplingError(f"{name} must be True, False or a list of them, not {_shown(value)}")


def callables(name: str, value: object) -> None:
    """None or a sequence of things that can be called."""
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or not all(callable(entry) for entry in value):
        raise SamplingError(f"{name} must be a list of callables, not {_shown(value)}; put a single one into a list")


def mask(value: object) -> None:
    """Raise PromptError unless it is None or a tensor of two dimensions."""
    if value is None or (isinstance(value, Tensor) and value.dim() == 2):
        return
    raise PromptError(f"attention_mask must be a tensor [B, S], as input_ids, not {_shown(value)}")


def prompts(value: object) -> None:
    """Raise PromptError unless it can hold prompts: a tensor or a sequence of sequences."""
    if isinstance(value, Tensor):
        return
    if hasattr(value, "keys"):
        raise PromptError("input_ids is a mapping, as tokenizers return it; pass its entry: encoding['input_ids']")
    rows = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not rows or not all(isinstance(row, (list, tuple)) for row in value):  # type: ignore[attr-defined]
        raise PromptError(
            f"input_ids must be a LongTensor [B, S] or a list of lists of ids, not {_shown(value)}; turn text into ids "
            "first, and put the ids of a single text into a list"
        )


def as_integer(value: object) -> int | None:
    """The integer it is, if it is one."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None


def is_integer(value: object) -> bool:
    """Whether it is an integer, NumPy's included; a truth value is none."""
    # Most are plain ones, and asking an abstract class takes a microsecond for each token of a prompt.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _is_number(value: object) -> bool:
    if type(value) is float or type(value) is int:
        return _fits_a_float(value)
    return not isinstance(value, bool) and isinstance(value, Real) and _fits_a_float(value)


def _fits_a_float(value: Real | float) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
