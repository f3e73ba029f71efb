"""Searches HLO for operations that the Neuron compiler is documented to reject, or to compute differently.

Each rule names its source: codes are those of the compiler's error pages; "operator list" is the list of supported
operators in its release notes; "known issues" are those of the JAX front end, which shares the compiler. The absence of
findings proves the absence of known problems only. Allowed operators that no list names are in `ALLOWED`, each with the
reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a module.

    type      of the result: ``f32[4,<=8]``, or several in parentheses
    operands  names; ``reads`` has their types, in the same order
    calls     the computation that it applies, or ""
    target    of a custom call, with its ``config``
    constant  ``inf``, ``nan``, both, or "" for a constant that is finite
    """

    computation: str
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    calls: str = ""
    target: str = ""
    config: str = ""
    constant: str = ""
    is_root: bool = False

    @property
    def elements(self) -> tuple[str, ...]:
        """Element types of the result, one for each part of a tuple."""
        return tuple(_ELEMENT.findall(self.type))

    @property
    def is_floating(self) -> bool:
        """Whether results and operands are floating-point numbers."""
        return all(kind.startswith(("f", "bf")) for kind in _ELEMENT.findall(" ".join((self.type, *self.reads))))

    def __str__(self) -> str:
        return f"{self.name} = {self.type} {self.opcode}"


_ELEMENT = re.compile(r"\b(pred|bf16|[a-z]\d+(?:e\dm\d\w*)?)\[")


@dataclass(frozen=True, slots=True)
class Module:
    """All instructions, in their order."""

    instructions: tuple[Instruction, ...]

    def of(self, *opcodes: str) -> Iterator[Instruction]:
        """Yield the instructions with some opcodes."""
        return (line for line in self.instructions if line.opcode in opcodes)

    def named(self, computation: str, name: str) -> Instruction | None:
        """Return an instruction of a computation."""
        return next((x for x in self.instructions if x.computation == computation and x.name == name), None)

    def root(self, computation: str) -> Instruction | None:
        """Return a computation's result."""
        return next((x for x in self.instructions if x.computation == computation and x.is_root), None)


_TYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64",
    10: "f16", 11: "f32", 12: "f64", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128",
    19: "f8e5m2", 20: "f8e4m3fn",
}  # fmt: skip
"""xla.PrimitiveType."""
_TUPLE = 13


def module_of(proto: Any) -> Module:
    """Convert a module to instructions, without layouts and finite values.

    The message is read by the names of its fields, which XLA publishes (xla/service/hlo.proto, xla/xla_data.proto),
    so that no generated classes are needed.
    """
    computations = {one.id: one.name for one in proto.computations}
    instructions: list[Instruction] = []
    for computation in proto.computations:
        known = {one.id: one for one in computation.instructions}
        for one in computation.instructions:
            operands = [known[number] for number in one.operand_ids]
            instructions.append(
                Instruction(
                    computation.name,
                    one.name,
                    _shape(one.shape),
                    one.opcode,
                    tuple(operand.name for operand in operands),
                    tuple(_shape(operand.shape) for operand in operands),
                    next((computations[number] for number in one.called_computation_ids), ""),
                    one.custom_call_target,
                    one.backend_config.decode("utf-8", "replace"),
                    _constant(one.literal) if one.opcode == "constant" else "",
                    one.id == computation.root_id,
                )
            )
    return Module(tuple(instructions))


def _shape(shape: Any) -> str:
    """Return a shape as text: ``f32[4,<=8]``, or several in parentheses."""
    if shape.element_type == _TUPLE:
        return f"({', '.join(_shape(part) for part in shape.tuple_shapes)})"
    moving = [*shape.is_dynamic_dimension, *[False] * len(shape.dimensions)]
    sizes = [f"<={size}" if moves else str(size) for size, moves in zip(shape.dimensions, moving, strict=False)]
    return f"{_TYPES.get(shape.element_type, 'unknown')}[{','.join(sizes)}]"


def _constant(literal: Any) -> str:
    """Return `Instruction.constant`. 16-bit numbers are bytes, the low one first."""
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


_LIST = """
    abs add all-gather all-reduce atan2 bitcast-convert broadcast ceil clamp compare concatenate constant
    convert cosine custom-call divide dot dynamic-update-slice exponential floor gather get-tuple-element iota
    log maximum minimum multiply negate pad parameter power reduce reshape reverse rsqrt scatter select
    shift-right-logical sign sine slice sqrt subtract tanh transpose tuple
"""
LISTED = frozenset(_LIST.split())
"""The published operator list, in HLO's own spelling."""

ALLOWED = {
    "and": "the list has LogicalAnd; on words it is what masks are made of",
    "or": "as `and`",
    "not": "the list has LogicalNot",
    "xor": "bitwise like and/or; to be seen on hardware first: `paceline selftest` compares the noise bit by bit",
    "shift-right-arithmetic": "EVRF022 refuses it for other widths than 32 bits, so 32 bits are taken",
    "logistic": "named in the release notes of compiler 2.27 (complex64 operators)",
    "log-plus-one": "named in the release notes of compiler 2.32 (complex64 operators)",
    "dynamic-slice": "named in the same notes",
    "reduce-scatter": "EVRF063 refuses it for integers, so floats are taken",
}
"""Operators outside the list, with the reasons for accepting them."""

CUSTOM_CALLS = re.compile(
    r"AwsNeuron(Erf|Gelu|GeluApprxTanh|GeluBackward|Silu|SiluBackward|RmsNorm|Softmax|SoftmaxBackward|CollectiveMatmul|"
    r"IntMatmult|ArgMax|ArgMin|TopK|DropoutMaskV1|CustomNativeKernel|CustomOp|DevicePrint|LNCShardingConstraint|"
    r"TransferWithStaticRing|ModuleMarker\w+)|ResizeNearest|ResizeBilinear|ResizeNearestGrad|NeuronBoundaryMarker-\w+"
)
"""Targets supported by the compiler (EHCA005)."""

_SIGN_CHECK = frozenset({"convert", "constant", "broadcast", "compare"})


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One place that breaks a rule."""

    rule: str
    where: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}"


Rule = Callable[[Module], Iterator[Instruction]]


UNDECIDED = frozenset({"unlisted", "top-k without k"})
"""Rules that no document states as a rejection: violations may compile."""


def lint(module: Module) -> list[LintFinding]:
    """Return every finding in a module."""
    return [LintFinding(name, str(line)) for name, rule in RULES.items() for line in rule(module)]


def _dynamic(module: Module) -> Iterator[Instruction]:
    """EMOD025: any dynamic dimension, even a bounded one."""
    for line in module.instructions:
        if "<=" in line.type or line.opcode in {"set-dimension-size", "get-dimension-size", "dynamic-reshape"}:
            yield line


def _reduction(module: Module) -> Iterator[Instruction]:
    """Operator list: reductions by min, max, add and multiply only."""
    for line in module.of("reduce", "reduce-window"):
        root = module.root(line.calls)
        if root is not None and root.opcode not in {"add", "maximum", "minimum", "multiply", "tuple"}:
            yield line


def _integer_scatter(module: Module) -> Iterator[Instruction]:
    """EVRF016, EVRF060: scatter that computes with integers; overwriting is allowed."""
    for line in module.of("scatter"):
        root = module.root(line.calls)
        if not line.is_floating and (root is None or root.opcode != "parameter"):
            yield line


def _wide(module: Module) -> Iterator[Instruction]:
    """Data types: no float64; int64 only where PyTorch/XLA looks whether a row number is negative, which it never is.

    That check (convert, compare with 0) survives the compiler's narrowing to 32 bits: numbers stay below 2**24.
    """
    for line in module.instructions:
        types = {*_ELEMENT.findall(" ".join((line.type, *line.reads)))}
        if "f64" in types or ({"s64", "u64"} & types and line.opcode not in _SIGN_CHECK):
            yield line


def _moving_update(module: Module) -> Iterator[Instruction]:
    """Operator list: dynamic-update-slice takes constant indices only."""
    for line in module.of("dynamic-update-slice"):
        places = [module.named(line.computation, name) for name in line.operands[2:]]
        if any(place is None or place.opcode != "constant" for place in places):
            yield line


def _unlisted(module: Module) -> Iterator[Instruction]:
    """EVRF001, EUOC002: an operator that no published list names."""
    own = {"sort", "topk", "while", "conditional", "reduce-window", "infeed", "outfeed", "send", "recv"}
    known = LISTED | set(ALLOWED) | own
    return (line for line in module.instructions if line.opcode not in known and not line.opcode.startswith("rng"))


RULES: dict[str, Rule] = {
    # EVRF029, EVRF014: sort and what lowers to it
    "sort": lambda module: module.of("sort", "topk"),
    "dynamic dimension": _dynamic,
    # known issues: reductions of several operands at once (a plain argmax)
    "variadic reduce": lambda module: (x for x in module.of("reduce", "reduce-window") if x.type.startswith("(")),
    "reduction": _reduction,
    # EVRF035 and known issues: integer products are rejected, or computed in float32
    "integer dot": lambda module: (x for x in module.of("dot") if not x.is_floating),
    # EVRF061, EVRF063
    "integer collective": lambda module: (x for x in module.of("all-reduce", "reduce-scatter") if not x.is_floating),
    "integer scatter": _integer_scatter,
    "64 bits": _wide,
    # EVRF006 and the operator list: the device ignores seeds
    "random": lambda module: (x for x in module.instructions if x.opcode.startswith("rng")),
    # known issues: dynamic loops and conditionals
    "control flow": lambda module: module.of("while", "conditional", "infeed", "outfeed", "send", "recv"),
    # EHCA005, EVRF015
    "custom call": lambda module: (x for x in module.of("custom-call") if not CUSTOM_CALLS.fullmatch(x.target)),
    # `torch_neuronx/python_ops/xla_ops/topk_xla.py` (2026-04-21): the call's configuration is its k as text
    "top-k without k": lambda module: (
        x for x in module.of("custom-call") if x.target == "AwsNeuronTopK" and not x.config.isdigit()
    ),
    # runtime status 1003: NaN is an error, and infinity may become one
    "infinite constant": lambda module: (x for x in module.of("constant") if x.constant),
    "moving update": _moving_update,
    # EVRF022: arithmetic right shift of other widths than 32 bits
    "shift": lambda module: (x for x in module.of("shift-right-arithmetic") if x.elements not in {("s32",), ("u32",)}),
    "unlisted": _unlisted,
}
"""Every rule by its name."""
