"""HLO modules as the protobuf that the SDK traces (``xla.HloModuleProto``), read into what a linter looks at.

The message is read by the names of its fields, which XLA publishes (xla/service/hlo.proto, xla/xla_data.proto), so that
no generated classes are needed here. Not here: the rules (`paceline.decoder.compile.hlo_lint`), and modules as text.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.decoder.compile.hlo import Instruction, Module

_TYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64",
    10: "f16", 11: "f32", 12: "f64", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128",
    19: "f8e5m2", 20: "f8e4m3fn",
}  # fmt: skip
"""xla.PrimitiveType."""
_TUPLE = 13


def module_of(proto: Any) -> Module:
    """A module of which each instruction says what its line would say in text, without layouts and finite values."""
    computations = {one.id: one.name for one in proto.computations}
    instructions: list[Instruction] = []
    for computation in proto.computations:
        known = {one.id: one for one in computation.instructions}
        for one in computation.instructions:
            operands = (known[number] for number in one.operand_ids)
            inside = ", ".join(f"{_shape(operand.shape)} %{operand.name}" for operand in operands)
            if one.opcode == "constant":
                inside = _constant(one.literal)
            called = [f"to_apply=%{computations[number]}" for number in one.called_computation_ids]
            target = [f'custom_call_target="{one.custom_call_target}"'] if one.custom_call_target else []
            suffix = "".join(f", {attribute}" for attribute in (*called, *target))
            is_root = one.id == computation.root_id
            instructions.append(
                Instruction(computation.name, one.name, _shape(one.shape), one.opcode, inside, suffix, is_root)
            )
    return Module(tuple(instructions))


def _shape(shape: Any) -> str:
    """``f32[4,<=8]``, or several in parentheses."""
    if shape.element_type == _TUPLE:
        return f"({', '.join(_shape(part) for part in shape.tuple_shapes)})"
    moving = [*shape.is_dynamic_dimension, *[False] * len(shape.dimensions)]
    sizes = [f"<={size}" if moves else str(size) for size, moves in zip(shape.dimensions, moving, strict=False)]
    return f"{_TYPES.get(shape.element_type, 'unknown')}[{','.join(sizes)}]"


def _constant(literal: Any) -> str:
    """``inf``, ``nan`` or nothing: what rules ask of a constant. Numbers of 16 bits are bytes, the low one first."""
    halves = ((literal.f16s, 0x7C00, 0x03FF), (literal.bf16s, 0x7F80, 0x007F))
    words = [
        (int.from_bytes(data[place : place + 2], "little"), exponent, fraction)
        for data, exponent, fraction in halves
        for place in range(0, len(data), 2)
    ]
    found = {"nan" if word & fraction else "inf" for word, exponent, fraction in words if word & exponent == exponent}
    for value in (*literal.f32s, *literal.f64s):
        if not math.isfinite(value):
            found.add("nan" if math.isnan(value) else "inf")
    return " ".join(sorted(found))
