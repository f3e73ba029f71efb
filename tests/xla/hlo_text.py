"""HLO as torch_xla prints it, read into what the lint reads from the compiler's protobuf; no tests."""

from __future__ import annotations

import re
from collections import Counter

from torch import Tensor, nn

from paceline.neuron import hlo_lint, xla
from paceline.neuron.hlo_lint import Instruction, LintFinding, Module
from paceline.neuron.lowering import lower

MAX_INSTRUCTIONS = 40_000
"""A graph's budget: unrolled drafts are what makes graphs long (EVRF007, EXTP004)."""

_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>.+?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{\s*$")
_TYPE = r"\b(?:pred|bf16|[a-z]\d+(?:e\dm\d\w*)?)\[[^\]]*\]"


def hlo(name: str, step: nn.Module, example: tuple[Tensor, ...], *, degree: int = 1) -> str:
    """A step's HLO before any optimisation, which is what the Neuron compiler is given."""
    results, home = xla.hlo_results(lower(name, step, example), degree=degree), xla.device()
    text: str = home.bridge._get_xla_tensors_hlo(results)
    home.bridge._clear_pending_irs(str(home.torch))
    return text


def parse(text: str) -> Module:
    """Parse a module."""
    instructions: list[Instruction] = []
    computation = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header.group("name")
        elif match := _INSTRUCTION.match(line):
            name, kind, opcode = match.group("name", "type", "opcode")
            inside, suffix = _split(match.group("rest"))
            held = " ".join(re.findall(r"\b(?:inf|nan)\b", inside)) if opcode == "constant" else ""
            instructions.append(
                Instruction(
                    computation, name, kind, opcode, tuple(re.findall(r"%([\w.-]+)", inside)),
                    tuple(re.findall(_TYPE, inside)), _attribute(suffix, "to_apply"),
                    _attribute(suffix, "custom_call_target"), _attribute(suffix, "backend_config"), held,
                    match.group("root") is not None,
                )
            )  # fmt: skip
    return Module(tuple(instructions))


def _attribute(suffix: str, name: str) -> str:
    match = re.search(rf"\b{name}=\"?%?([\w.\-$]+)", suffix)
    return match.group(1) if match else ""


def _split(rest: str) -> tuple[str, str]:
    """The text inside the opcode's parentheses, and the text after them."""
    depth = 1
    for place, sign in enumerate(rest):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def lint(text: str, *, budget: int = MAX_INSTRUCTIONS) -> list[LintFinding]:
    """Every finding in a module's text, which has a budget of instructions."""
    module = parse(text)
    findings = hlo_lint.lint(module)
    if len(module.instructions) > budget:
        findings.append(LintFinding("budget", f"{len(module.instructions)} instructions; the budget is {budget}"))
    return findings


def census(text: str) -> Counter[str]:
    """How often each operator occurs."""
    return Counter(line.opcode for line in parse(text).instructions)
