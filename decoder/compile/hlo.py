"""HLO modules read from their text form, as far as a linter needs: instructions, their types and their operands.

Not a full parser: layouts, sharding and metadata are left as text. The text is what XLA itself prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{\s*$")
_NAMED = re.compile(r"%([\w.-]+)")
_ELEMENT = re.compile(r"\b(pred|bf16|[a-z]\d+(?:e\dm\d\w*)?)\[")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a module.

    type      as printed: ``f32[4,8]{1,0}``, or several in parentheses
    inside    what stands between the parentheses: operands with their types, or a constant's value
    suffix    attributes behind the parentheses
    """

    computation: str
    name: str
    type: str
    opcode: str
    inside: str
    suffix: str
    is_root: bool

    @property
    def elements(self) -> tuple[str, ...]:
        """Element types of the result, one for each part of a tuple."""
        return tuple(_ELEMENT.findall(self.type))

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(_NAMED.findall(self.inside))

    def attribute(self, name: str) -> str:
        """The value of an attribute without its sign of a name, or nothing."""
        match = re.search(rf"\b{name}=\"?%?([\w.\-$]+)", self.suffix)
        return match.group(1) if match else ""

    def __str__(self) -> str:
        return f"{self.name} = {self.type} {self.opcode}"


@dataclass(frozen=True, slots=True)
class Module:
    """All instructions, in the order of the text."""

    instructions: tuple[Instruction, ...]

    def of(self, *opcodes: str) -> Iterator[Instruction]:
        """Those of some opcodes."""
        return (line for line in self.instructions if line.opcode in opcodes)

    def named(self, computation: str, name: str) -> Instruction | None:
        """An instruction of a computation."""
        return next((x for x in self.instructions if x.computation == computation and x.name == name), None)

    def root(self, computation: str) -> Instruction | None:
        """What a computation results in."""
        return next((x for x in self.instructions if x.computation == computation and x.is_root), None)


def parse(text: str) -> Module:
    """Read a module."""
    instructions: list[Instruction] = []
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header.group("name")
        elif match := _INSTRUCTION.match(line):
            inside, suffix = _split(match.group("rest"))
            name, kind, opcode = match.group("name", "type", "opcode")
            is_root = match.group("root") is not None
            instructions.append(Instruction(computation, name, kind, opcode, inside, suffix, is_root))
    return Module(tuple(instructions))


def _split(rest: str) -> tuple[str, str]:
    """What is inside the opcode's parentheses, and what follows them."""
    depth = 1
    for place, sign in enumerate(rest):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return rest[:place], rest[place + 1 :]
    return rest, ""
