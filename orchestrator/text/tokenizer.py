"""Tokenizers from checkpoints, and prompts as ids. Pieces of growing text: `paceline.core.detokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.core.detokenizer import IncrementalDetokenizer, Tokenizer
from paceline.core.errors import CheckpointError, PromptError
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.locate import checkpoint_path
from paceline.text.quick_tokenizer import quick_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "has_tokenizer", "load_tokenizer", "prompt_ids"]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint: a folder, a GGUF file, or a fetched model. No code in it is run.

    Raises:
        CheckpointError: there is none that can be read.
    """
    folder = checkpoint_path(folder)
    if is_gguf(folder):
        from paceline.text.gguf_tokenizer import load_gguf_tokenizer  # loads PyTorch

        return load_gguf_tokenizer(folder)
    try:
        loaded: Any = quick_tokenizer(folder)
        if loaded is None:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(
            f"{folder} has no tokenizer that can be read ({error}); put the model's tokenizer.json into it"
        ) from error
    tokenizer: Tokenizer = loaded
    return tokenizer


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint, given as to `load_tokenizer`, holds a tokenizer: a GGUF file always does."""
    place = checkpoint_path(path)
    return is_gguf(place) or (place / "tokenizer.json").is_file()


def prompt_ids(tokenizer: Tokenizer, text: str, name: str = "the prompt") -> list[int]:
    """A prompt's ids, at least one. ``name`` is what an error calls it.

    Raises:
        PromptError: it gives none.
    """
    ids = tokenizer.encode(text, verbose=False)  # verbose: what is too long is said further on, with the remedy
    if not ids:
        raise PromptError(f"{name} is empty, and this model's tokenizer puts no token before it; give some text")
    return ids
