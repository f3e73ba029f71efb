"""Prompts that commands read from files: a whole text, or JSON lines with a "prompt" in each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.core.errors import PromptError


def text(file: Path) -> str:
    """What is in a file, or on stdin ('-').

    Raises:
        PromptError: it cannot be read.
    """
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error


def prompts(file: Path) -> list[str]:
    """The prompt of every line.

    Raises:
        PromptError: it cannot be read, or a line is no JSON object with a "prompt".
    """
    lines = [line for line in text(file).splitlines() if line.strip()]
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise PromptError(f'{file} must hold JSON lines, each with a "prompt" ({error})') from error
