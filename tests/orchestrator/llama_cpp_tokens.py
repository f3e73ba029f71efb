"""llama.cpp's tokens: python llama_cpp_tokens.py FILE... ; a JSON list of texts on standard input, of which each file
reads all. Answers a line for each file: a JSON list of lists of ids, or null where it cannot be read.

Runs where `llama_cpp` is installed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llama_cpp as cpp  # type: ignore[import-not-found]


def tokens(file: str, texts: list[str]) -> list[list[int]] | None:
    """Without bos and eos; special tokens are not looked for in the text."""
    options: Any = cpp.llama_model_default_params()
    options.vocab_only = True
    model = cpp.llama_model_load_from_file(file.encode(), options)
    if not model:
        return None
    vocabulary, made = cpp.llama_model_get_vocab(model), []
    for text in texts:
        data = text.encode()
        room = (cpp.llama_token * (len(data) + 8))()
        count = cpp.llama_tokenize(vocabulary, data, len(data), room, len(room), False, False)
        made.append(list(room[:count]))
    cpp.llama_model_free(model)
    return made


def main() -> None:
    """Print a line for each file."""
    texts = json.load(sys.stdin)
    for file in sys.argv[1:]:
        print(json.dumps(tokens(file, texts)), flush=True)


if __name__ == "__main__":
    main()
