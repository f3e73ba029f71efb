"""Prompts that commands read from files: a whole text, or JSON lines with a "prompt" in each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.core.errors import PromptError


def text(file: Path) -> str:
    """What is in a file, or on stdin ('-'); the mark that some editors put before UTF-8 is no part of it.

    Raises:
        PromptError: it cannot be read, or is no text.
    """
    try:
        return checked(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {file}: {error}") from error


def checked(text: str, where: str) -> str:
    """A text from ``where``, as it is.

    Raises:
        PromptError: it cannot be written as UTF-8: JSON, and bytes of a command line that are none, may make such.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where} holds half a surrogate pair, which is no character; give UTF-8") from error
    return text


def prompts(file: Path) -> list[str]:
    """The prompt of every line.

    Raises:
        PromptError: it cannot be read, or a line is no JSON object with a "prompt" that is a text.
    """
    # Not `splitlines`: JSON leaves Unicode's line ends as they are.
    return [_prompt(line, file) for line in text(file).split("\n") if line.strip()]


def _prompt(line: str, file: Path) -> str:
    try:
        prompt, reason = json.loads(line)["prompt"], "a prompt must be a text"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        prompt, reason = None, str(error)
    if not isinstance(prompt, str):
        raise PromptError(f'{file} must hold JSON lines, each with a "prompt" ({reason})')
    return checked(prompt, str(file))
