"""Tokenizers from checkpoints' folders, and prompts as ids. Pieces of growing text: `paceline.core.detokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.detokenizer import IncrementalDetokenizer, Tokenizer
from paceline.core.errors import CheckpointError, PromptError

__all__ = ["IncrementalDetokenizer", "Tokenizer", "load_tokenizer", "prompt_ids"]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a checkpoint's folder; code in the folder is never run, nothing is fetched.

    Raises:
        CheckpointError: there is none that can be read.
    """
    from transformers import AutoTokenizer  # slow to import; most workers never see a text

    try:
        made: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read ({error}); put the model's tokenizer.json into it"
        ) from error
    tokenizer: Tokenizer = made
    return tokenizer


def prompt_ids(tokenizer: Tokenizer, text: str, name: str = "the prompt") -> list[int]:
    """A prompt's ids, at least one. ``name`` is what an error calls it.

    Raises:
        PromptError: it gives none.
    """
    ids = tokenizer.encode(text, verbose=False)  # verbose: what is too long is said further on, with the remedy
    if not ids:
        raise PromptError(f"{name} is empty, and this model's tokenizer puts no token before it; give some text")
    return ids
