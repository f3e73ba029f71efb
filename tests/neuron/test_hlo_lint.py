"""Every rule of the HLO linter finds what breaks it. Modules here are plain objects with the fields of the protobuf."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.neuron import hlo_lint
from paceline.neuron.hlo_lint import LintFinding, lint, module_of

PRED, S32, S64, BF16, F32, TUPLE = 1, 4, 5, 16, 11, 13
SUM, OR, KEEP, ENTRY = 1, 2, 3, 4  # ids of computations


def shape(kind: int, *sizes: int, moving: tuple[bool, ...] = (), parts: tuple[object, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(element_type=kind, dimensions=sizes, is_dynamic_dimension=moving, tuple_shapes=parts)


def constant(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**{"f16s": b"", "bf16s": b"", "f32s": (), "f64s": (), **values})


def line(name: str, opcode: str, made: SimpleNamespace, *reads: int, number: int = 20, **more: object) -> object:
    fields = {"called_computation_ids": (), "custom_call_target": "", "backend_config": b"", "literal": constant()}
    fields |= {"id": number, "name": f"{name}.{number}", "opcode": opcode, "shape": made, "operand_ids": reads}
    return SimpleNamespace(**{**fields, **more})


def combining(number: int, name: str, opcode: str, kind: int) -> SimpleNamespace:
    """A computation that reductions apply; ``parameter`` keeps the second of two."""
    x, y = (line(part, "parameter", shape(kind), number=10 * number + at) for at, part in enumerate("xy"))
    read = () if opcode == "parameter" else (10 * number, 10 * number + 1)
    result = line("result", opcode, shape(kind), *read, number=10 * number + 2)
    return SimpleNamespace(id=number, name=name, instructions=[x, y, result], root_id=10 * number + 2)


def proto(*lines: object) -> SimpleNamespace:
    """A module that sums the rows of its parameter, with some lines more."""
    entry = [
        line("floats", "parameter", shape(F32, 4, 8), number=1),
        line("constant", "constant", shape(F32), number=2, literal=constant(f32s=(0.0,))),
        line("words", "constant", shape(S32, 2), number=3),
        line("wide", "convert", shape(S64, 2), 3, number=4),  # as torch_xla asks whether a row number is negative
        line("mask", "parameter", shape(PRED, 4, 8), number=5),
        *lines,
        line("reduce", "reduce", shape(F32, 4), 1, 2, number=8, called_computation_ids=(SUM,)),
        line("tuple", "tuple", shape(TUPLE, parts=(shape(F32, 4),)), 8, number=9),
    ]
    applied = [combining(SUM, "Sum", "add", F32), combining(OR, "Or", "or", PRED)]
    applied.append(combining(KEEP, "Keep", "parameter", S32))
    return SimpleNamespace(
        computations=[*applied, SimpleNamespace(id=ENTRY, name="Entry", instructions=entry, root_id=9)]
    )


def found(*lines: object) -> list[LintFinding]:
    return lint(module_of(proto(*lines)))


TOP_K = {"custom_call_target": "AwsNeuronTopK"}
BREAKING = {
    "sort": line("s", "sort", shape(F32, 4, 8), 1, called_computation_ids=(SUM,)),
    "dynamic dimension": line("d", "add", shape(F32, 4, 8, moving=(True, False)), 1, 1),
    "variadic reduce": line("v", "reduce", shape(TUPLE, parts=(shape(F32, 4), shape(S32, 4))), 1, 2),
    "reduction": line("r", "reduce", shape(PRED, 4), 5, 5, called_computation_ids=(OR,)),
    "integer dot": line("i", "dot", shape(S32, 2), 3, 3),
    "integer collective": line("a", "all-reduce", shape(S32, 2), 3, called_computation_ids=(SUM,)),
    "integer scatter": line("c", "scatter", shape(S32, 2), 3, 3, 3, called_computation_ids=(SUM,)),
    "64 bits": line("w", "add", shape(S64, 2), 4, 4),
    "random": line("g", "rng", shape(F32, 4), 2, 2),
    "control flow": line("l", "while", shape(TUPLE, parts=(shape(S32),)), 3),
    "custom call": line("k", "custom-call", shape(F32, 4), 1, custom_call_target="TopK"),
    "top-k without k": line("k", "custom-call", shape(F32, 4), 1, **TOP_K),
    "infinite constant": line("n", "constant", shape(F32, 2), literal=constant(f32s=(1.0, -float("inf")))),
    "moving update": line("u", "dynamic-update-slice", shape(F32, 4, 8), 1, 1, 3, 1),
    "shift": line("h", "shift-right-arithmetic", shape(BF16, 2), 3, 3),
    "unlisted": line("q", "erf", shape(F32, 4, 8), 1),
}


def test_a_clean_module_has_no_finding_and_its_parts_are_read() -> None:
    assert found() == []
    module = module_of(proto())
    (reduce,) = module.of("reduce")
    assert (reduce.operands, reduce.reads) == (("floats.1", "constant.2"), ("f32[4,8]", "f32[]"))
    assert (reduce.elements, reduce.calls, str(reduce)) == (("f32",), "Sum", "reduce.8 = f32[4] reduce")
    root, constant_3 = module.root("Sum"), module.named("Entry", "words.3")
    assert root is not None and root.opcode == "add" and constant_3 is not None and constant_3.type == "s32[2]"


def test_there_is_a_breaking_line_for_every_rule() -> None:
    assert set(BREAKING) == set(hlo_lint.RULES)


@pytest.mark.parametrize("rule", BREAKING)
def test_a_line_that_breaks_a_rule_is_found(rule: str) -> None:
    assert [one.rule for one in found(BREAKING[rule])] == [rule]


@pytest.mark.parametrize(
    "fine",
    [
        line("c", "compare", shape(PRED, 2), 4, 4),  # is a row number negative?
        line("s", "shift-right-arithmetic", shape(S32, 2), 3, 3),
        line("k", "custom-call", shape(F32, 4), 1, backend_config=b"5", **TOP_K),
        line("u", "dynamic-update-slice", shape(F32, 4, 8), 1, 1, 2, 3),
        line("c", "scatter", shape(S32, 2), 3, 3, 3, called_computation_ids=(KEEP,)),
    ],
    ids=lambda one: one.opcode,
)
def test_valid_lines_similar_to_violations_pass(fine: object) -> None:
    assert found(fine) == []


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
def test_constants_are_checked_for_infinity(literal: SimpleNamespace, said: str) -> None:
    module = module_of(proto(line("c", "constant", shape(F32, 2), literal=literal)))
    (made,) = (one for one in module.instructions if one.name == "c.20")
    assert made.constant == said
    assert [one.rule for one in lint(module)] == (["infinite constant"] if said else [])
