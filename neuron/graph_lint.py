"""Fast checks of an exported graph, before any compiler runs on the lowered step.

It needs neither torch_xla nor a device, so it runs in every test run, and before every Neuron compilation, which may
take an hour. Checks that require HLO are in `paceline.neuron.hlo_lint`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from paceline.neuron.hlo_lint import LintFinding
from paceline.neuron.lowering import Lowered, constants_of, operator
from paceline.neuron.step_work import COLLECTIVES, KERNELS

_LOWERS = """
    " __and__ __or__ __xor__ _to_copy _unsafe_view abs add alias amax amin arange bitwise_and bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor cat clamp clone convert_element_type detach div embedding eq exp expand expm1 flip
    floor full full_like ge getitem gt index_put index_select largest le linear log log1p lt matmul maximum mul ne neg
    new_zeros ones_like pad permute pow product reshape rsqrt select silu slice split split_with_sizes sqrt squeeze
    stack sub sum tanh transpose unbind unsqueeze view wait_tensor where zeros zeros_like
"""
LOWERS = frozenset(_LOWERS.split())
"""Operators that lower to HLO without findings. Others are not wrong, only unchecked."""

PRODUCTS = frozenset({"bmm", "linear", "matmul", "mm", "product"})
_MOVES = frozenset({"clone", "expand", "index_select", "permute", "reshape", "select", "slice", "squeeze", "transpose"})
_MOVES |= {"unsqueeze", "view", "_unsafe_view", "_to_copy", "convert_element_type"}

WIDE = frozenset({torch.int64, torch.float64, torch.complex64, torch.complex128})
REDUCTIONS = {"amax": (), "amin": (), "sum": None, "mean": None, "prod": None}
"""Operators over dimensions, and those that they have where none are given."""
BITWISE = frozenset({f"__{name}__" for name in ("and", "or", "xor", "lshift", "rshift")})
BITWISE |= {f"bitwise_{name}" for name in ("and", "or", "xor", "left_shift", "right_shift")}
"""Operators that torch-mlir lowers with tensors on both sides only."""
DIVISIONS = frozenset({"floor_divide", "fmod", "remainder"})
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool})


def lint(lowered: Lowered) -> list[LintFinding]:
    """Return every finding in a lowered step."""
    findings = [*_aliases(lowered), *_constants(lowered)]
    for node in lowered.graph.graph.nodes:
        if node.op == "call_function":
            findings += _operator(node)
        if node.op == "get_attr":
            told = f"{node.name} belongs to the module: make it an input and an output"
            findings.append(LintFinding("held state", told))
        findings += _value(node)
    return findings


def _operator(node: fx.Node) -> Iterator[LintFinding]:
    name = operator(node.target)
    if name not in LOWERS | COLLECTIVES | KERNELS:
        yield LintFinding("operator", f"{node.name}: {node.target} has not been seen to lower; see graph_lint.LOWERS")
    if name in PRODUCTS and _first(node).dtype in _INTEGERS:
        yield LintFinding("integer dot", f"{node.name}: a product of integers is computed in float32, or refused")
    if name in PRODUCTS:
        for side in node.args[:2]:
            if isinstance(side, fx.Node) and (state := _widened(side)):
                yield LintFinding(
                    "widened weight", f"{node.name} multiplies {state}, which every step widens to float32"
                )
    dims = node.args[1] if len(node.args) > 1 else REDUCTIONS.get(name)
    if name in REDUCTIONS and isinstance(dims, (list, tuple)) and not dims:
        yield LintFinding("empty reduction", f"{node.name} names no dimension: torch_xla 2.9 makes a copy of it")
    if name in BITWISE and not all(isinstance(side, fx.Node) for side in node.args[:2]):
        yield LintFinding(
            "bitwise number", f"{node.name}: torch-mlir takes {name} of two tensors, not of a Python number"
        )
    if name in DIVISIONS or (name == "div" and _first(node).dtype in _INTEGERS):
        yield LintFinding("integer division", f"{node.name}: torch_xla 2.9 divides integers in floating point")
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        yield LintFinding("write in place", f"{node.name} writes into its argument, and an export loses that")
    if name in COLLECTIVES and _first(node).dtype in _INTEGERS:
        yield LintFinding("integer collective", f"{node.name}: a sum over ranks of integers is refused")
    for number in _numbers([*node.args, *node.kwargs.values()]):
        if not math.isfinite(number):
            yield LintFinding("infinite constant", f"{node.name}: {number}")


def _widened(node: fx.Node) -> str:
    """Return the 16-bit weight or cache that reaches a matmul after conversion to float32; "" if none does."""
    wide = False
    while node.op == "call_function" and operator(node.target) in _MOVES and isinstance(node.args[0], fx.Node):
        before = node.args[0]
        narrow = before.meta["val"].dtype in {torch.bfloat16, torch.float16}
        wide = wide or (narrow and node.meta["val"].dtype == torch.float32)
        node = before
    is_state = node.op == "placeholder" or operator(node.target) == "index_put"
    return node.name if wide and is_state else ""


def _value(node: fx.Node) -> Iterator[LintFinding]:
    values = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if not isinstance(value, Tensor):
            continue
        if value.dtype in WIDE:
            yield LintFinding("64 bits", f"{node.name} is {value.dtype}")
        if not all(type(size) is int for size in value.shape):
            yield LintFinding("dynamic dimension", f"{node.name} has the shape {tuple(value.shape)}")


def _aliases(lowered: Lowered) -> Iterator[LintFinding]:
    """Check that every changed state is returned with its shape and type."""
    nodes = list(lowered.graph.graph.nodes)
    placeholders = dict(zip(lowered.state, nodes, strict=False))
    results = nodes[-1].args[0]
    for name, result in zip(lowered.changed, results, strict=False):
        before, after = placeholders[name].meta["val"], result.meta["val"]
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            yield LintFinding(
                "alias", f"{name}: {tuple(before.shape)} {before.dtype} comes back as {tuple(after.shape)}"
            )
        if result is placeholders[name]:
            yield LintFinding("alias", f"{name} comes back as it was, so nothing can be aliased to it")


def _constants(lowered: Lowered) -> Iterator[LintFinding]:
    """Check tensors made while tracing, which are weights to a device: finite, and of 32 bits."""
    for name, tensor in constants_of(lowered).items():
        if tensor.dtype in WIDE:
            yield LintFinding("64 bits", f"constant {name} is {tensor.dtype}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield LintFinding("infinite constant", f"constant {name}")


def _first(node: fx.Node) -> Tensor:
    first = node.args[0]
    assert isinstance(first, fx.Node), f"{node.name} multiplies nothing"
    value: Tensor = first.meta["val"]
    return value


def _numbers(arguments: list[object]) -> Iterator[float]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _numbers(list(argument))
        elif isinstance(argument, float):
            yield argument
