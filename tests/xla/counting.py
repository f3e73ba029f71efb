"""What an HLO module is made of; no tests in here."""

from __future__ import annotations

from collections import Counter

from paceline.neuron import hlo_lint


def census(text: str) -> Counter[str]:
    """How often each operator occurs."""
    return Counter(line.opcode for line in hlo_lint.parse(text).instructions)
