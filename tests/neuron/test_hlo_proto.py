"""Modules as protobufs are read as their text is; the messages here are plain objects with the same fields."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.neuron import hlo_lint
from tests.neuron.test_hlo_lint import CLEAN

S32, S64, BF16, F32, TUPLE = 4, 5, 16, 11, 13
SUM, ENTRY = 1, 2  # ids of computations


def shape(kind: int, *sizes: int, moving: tuple[bool, ...] = (), parts: tuple[object, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(element_type=kind, dimensions=sizes, is_dynamic_dimension=moving, tuple_shapes=parts)


def constant(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**{"f16s": b"", "bf16s": b"", "f32s": (), "f64s": (), **values})


def line(number: int, name: str, opcode: str, made: SimpleNamespace, *reads: int, **more: object) -> SimpleNamespace:
    fields = {
        "called_computation_ids": (),
        "custom_call_target": "",
        "backend_config": b"",
        "literal": constant(),
        **more,
    }
    return SimpleNamespace(id=number, name=f"{name}.{number}", opcode=opcode, shape=made, operand_ids=reads, **fields)


def proto(*lines: SimpleNamespace) -> SimpleNamespace:
    """The module `CLEAN` with some lines more."""
    scalar = shape(F32)
    adds = [line(5, "x", "parameter", scalar), line(6, "y", "parameter", scalar), line(7, "add", "add", scalar, 5, 6)]
    entry = [
        line(1, "p0", "parameter", shape(F32, 4, 8)),
        line(2, "constant", "constant", scalar, literal=constant(f32s=(0.0,))),
        line(3, "constant", "constant", shape(S32, 2)),
        *lines,
        line(8, "reduce", "reduce", shape(F32, 4), 1, 2, called_computation_ids=(SUM,)),
        line(9, "tuple", "tuple", shape(TUPLE, parts=(shape(F32, 4),)), 8),
    ]
    computations = [
        SimpleNamespace(id=SUM, name="AddComputation.4", instructions=adds, root_id=7),
        SimpleNamespace(id=ENTRY, name="IrToHlo.9", instructions=entry, root_id=9),
    ]
    return SimpleNamespace(computations=computations)


def test_a_module_is_what_its_text_is() -> None:
    made, read = hlo_lint.module_of(proto()), hlo_lint.parse(CLEAN)
    for ours, theirs in zip(made.instructions, read.instructions, strict=True):
        for part in ("computation", "name", "opcode", "is_root", "operands", "elements"):
            assert getattr(ours, part) == getattr(theirs, part), (part, str(ours))
        assert ours.attribute("to_apply") == theirs.attribute("to_apply")
    assert hlo_lint.lint_module(made) == []


BREAKING = {
    "sort": line(10, "s", "sort", shape(F32, 4, 8), 1, called_computation_ids=(SUM,)),
    "dynamic dimension": line(10, "d", "add", shape(F32, 4, 8, moving=(True, False)), 1, 1),
    "variadic reduce": line(10, "v", "reduce", shape(TUPLE, parts=(shape(F32, 4), shape(S32, 4))), 1, 2),
    "integer dot": line(10, "i", "dot", shape(S32, 2), 3, 3),
    "64 bits": line(10, "w", "add", shape(S64, 4), 1, 1),
    "custom call": line(10, "k", "custom-call", shape(F32, 4), 1, custom_call_target="TopK"),
    "top-k without k": line(10, "k", "custom-call", shape(F32, 4), 1, custom_call_target="AwsNeuronTopK"),
    "unlisted": line(10, "q", "erf", shape(F32, 4, 8), 1),
}


def test_a_top_k_says_its_k() -> None:
    said = {"custom_call_target": "AwsNeuronTopK", "backend_config": b"5"}
    module = hlo_lint.module_of(proto(line(10, "k", "custom-call", shape(F32, 4), 1, **said)))
    assert hlo_lint.lint_module(module) == []


@pytest.mark.parametrize("rule", BREAKING)
def test_a_line_that_breaks_a_rule_is_found(rule: str) -> None:
    assert [one.rule for one in hlo_lint.lint_module(hlo_lint.module_of(proto(BREAKING[rule])))] == [rule]


@pytest.mark.parametrize(
    ("literal", "said"),
    [
        (constant(f32s=(1.0, -float("inf"))), "inf"),
        (constant(f64s=(float("nan"),)), "nan"),
        (constant(bf16s=b"\x80\x3f\x80\x7f"), "inf"),  # 1 and infinity
        (constant(bf16s=b"\xc0\xff"), "nan"),
        (constant(f16s=b"\x00\x7c\x00\x3c"), "inf"),
        (constant(f32s=(3.4e38,), bf16s=b"\x7f\x7f", f16s=b"\xff\x7b"), ""),  # the largest of each
    ],
)
def test_constants_say_whether_they_are_finite(literal: SimpleNamespace, said: str) -> None:
    module = hlo_lint.module_of(proto(line(10, "c", "constant", shape(F32, 2), literal=literal)))
    (found,) = (one for one in module.instructions if one.name == "c.10")
    assert found.inside == said
    assert [one.rule for one in hlo_lint.lint_module(module)] == (["infinite constant"] if said else [])
