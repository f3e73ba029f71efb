"""Every rule of the HLO linter finds a graph that breaks it, as torch_xla really lowers that graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.neuron import hlo_lint, xla
from tests.xla.hlo_text import lint

FLOATS, WHOLE, ONE = torch.ones(4, 8), torch.ones(4, 4, dtype=torch.int32), torch.tensor(1, dtype=torch.int32)


def text(function: Callable[..., Any], *given: Tensor) -> str:
    """The HLO of a function, traced by torch_xla without changes: a broken function could not be exported."""
    home = xla.device()
    inputs = [x.to(home.torch) for x in given]
    home.library.sync()
    made = function(*inputs)
    found: str = home.bridge._get_xla_tensors_hlo([made] if isinstance(made, Tensor) else list(made))
    home.bridge._clear_pending_irs(str(home.torch))
    return found


def built(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that PyTorch has no name for, made of XLA's own."""
    made: Callable[..., Any] = importlib.import_module("torch_xla.core.xla_op_registry").register("built", function)
    return made


def branch(x: Any) -> Any:
    corner = x.slice_in_dim(0, 1, 0).slice_in_dim(0, 1, 1).reshape([])
    return (corner < corner.zeros_like()).mkconditional([x], lambda a: a + a, lambda a: a - a)


def move(x: Any, place: Any) -> Any:
    return x.dynamic_update_slice(x.slice_in_dim(0, 1, 0), [place, place.zeros_like()])


def shifted(x: Tensor) -> Tensor:
    return torch.bitwise_right_shift(x.to(torch.int16), torch.ones_like(x, dtype=torch.int16))


def reduced(x: Tensor) -> Tensor:
    found: Tensor = xla.device().bridge._xla_all_reduce("sum", x, 1.0, [[0, 1]], False)
    return found


def called(x: Tensor, target: str = "Mystery") -> list[Tensor]:
    found: list[Tensor] = xla.device().bridge._xla_custom_call(
        [x], target, [list(x.shape)], [x.dtype], False, "", 0, {}
    )
    return found


BREAKING: dict[str, Callable[[], str]] = {
    "sort": lambda: text(lambda x: x.topk(2).values, FLOATS),
    "dynamic dimension": lambda: text(built(lambda x, size: x.set_dimension_size(size, 0)), FLOATS, ONE),
    "variadic reduce": lambda: text(lambda x: x.argmax(-1).to(torch.int32), FLOATS),
    "reduction": lambda: text(lambda x: (x > 0).any(-1), FLOATS),
    "integer dot": lambda: text(lambda x: x @ x, WHOLE),
    "integer collective": lambda: text(reduced, WHOLE),
    "integer scatter": lambda: text(lambda x: x.scatter_add(0, torch.zeros_like(x, dtype=torch.int64), x), WHOLE),
    "64 bits": lambda: text(lambda x: x.double() * 2, FLOATS),
    "random": lambda: text(lambda x: x + torch.rand_like(x), FLOATS),
    "control flow": lambda: text(built(branch), FLOATS),
    "custom call": lambda: text(called, FLOATS),
    "top-k without k": lambda: text(lambda x: called(x, "AwsNeuronTopK"), FLOATS),
    "infinite constant": lambda: text(lambda x: x.var(), FLOATS[:, :1]),
    "moving update": lambda: text(built(move), FLOATS, ONE),
    "shift": lambda: text(shifted, WHOLE),
    "unlisted": lambda: text(torch.erf, FLOATS),
}


def test_there_is_a_breaking_graph_for_every_rule() -> None:
    assert set(BREAKING) == set(hlo_lint.RULES)


@pytest.mark.parametrize("rule", BREAKING)
def test_a_real_graph_that_breaks_a_rule_is_found(rule: str) -> None:
    assert rule in {finding.rule for finding in lint(BREAKING[rule]())}


def test_a_real_graph_that_is_too_long_is_found() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x * x + x
        return x

    found = text(long, FLOATS)
    assert lint(found) == []
    assert [one.rule for one in lint(found, budget=20)] == ["budget"]
