"""Whether the keywords of a call are of the right type, so that a slip is named before anything is computed with it.

Not whether they are in range: that is said where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

from torch import Tensor

from paceline.core.errors import PromptError, SamplingError


def integer(name: str, value: object) -> None:
    """Raise SamplingError unless it is None or an integer."""
    if value is not None and not is_integer(value):
        raise SamplingError(f"{name} must be an integer or None, not {_shown(value)}")


def number(name: str, value: object, *, optional: bool = True) -> None:
    """Raise SamplingError unless it is a number (or None, if that is a choice)."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not _floats(value):
        raise SamplingError(f"{name} must be a number{' or None' if optional else ''}, not {_shown(value)}")


def integers(name: str, value: object, *, optional: bool) -> None:
    """Raise SamplingError unless it is an integer or a sequence of them (or None, if that is a choice)."""
    if is_integer(value) or (optional and value is None):
        return
    if not isinstance(value, (list, tuple)) or not all(is_integer(one) for one in value):
        raise SamplingError(f"{name} must be an integer or a list of them, not {_shown(value)}")


def strings(name: str, value: object) -> None:
    """Raise SamplingError unless it is None, a string or a sequence of them."""
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise SamplingError(f"{name} must be a string or a list of strings, not {_shown(value)}")


def flag(name: str, value: object) -> None:
    """Raise SamplingError unless it is a truth value."""
    if not isinstance(value, bool):
        raise SamplingError(f"{name} must be True or False, not {_shown(value)}")


def flags(name: str, value: object) -> None:
    """Raise SamplingError unless it is a truth value or a sequence of them."""
    if isinstance(value, bool) or (isinstance(value, (list, tuple)) and all(isinstance(one, bool) for one in value)):
        return
    raise SamplingError(f"{name} must be True, False or a list of them, not {_shown(value)}")


def callables(name: str, value: object) -> None:
    """Raise SamplingError unless it is None or a sequence of things that can be called."""
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or not all(callable(one) for one in value):
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


def whole(value: object) -> int | None:
    """The integer it is, if it is one."""
    return int(value) if not isinstance(value, bool) and isinstance(value, Integral) else None


def is_integer(value: object) -> bool:
    """Whether it is an integer, NumPy's included; a truth value is none."""
    # Most are plain ones, and asking an abstract class takes a microsecond for each token of a prompt.
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _floats(value: Real) -> bool:
    """Whether floats have room for it."""
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
