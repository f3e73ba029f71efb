"""llama.cpp's greedy tokens, in float32: python llama_cpp_greedy.py COUNT FILE... ; token ids of a text on standard
input, separated by spaces. Answers a line for each file, or "error": the most probable token after every token of the
text, and then COUNT more of the continuation.

Runs where `llama_cpp` is installed. The cache is float32 and attention is computed as written.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp as cpp  # type: ignore[import-not-found]


def greedy(file: str, text: list[int], count: int) -> list[int]:
    options: Any = cpp.llama_model_default_params()
    options.use_mmap = False
    model = cpp.llama_model_load_from_file(file.encode(), options)
    if not model:
        raise ValueError(file)
    wanted: Any = cpp.llama_context_default_params()
    wanted.n_ctx = wanted.n_batch = wanted.n_ubatch = 256
    wanted.n_threads = wanted.n_threads_batch = 1
    wanted.type_k = wanted.type_v = cpp.GGML_TYPE_F32
    wanted.flash_attn_type = cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = cpp.llama_init_from_model(model, wanted)
    size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    made: list[int] = []
    for index in range(len(text) + count):
        token = text[index] if index < len(text) else made[-1]
        if cpp.llama_decode(context, cpp.llama_batch_get_one((cpp.llama_token * 1)(token), 1)):
            raise ValueError(file)
        logits = ctypes.cast(cpp.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float * size)).contents
        made.append(max(range(size), key=logits.__getitem__))
    cpp.llama_free(context)
    cpp.llama_model_free(model)
    return made


def main() -> None:
    text = [int(one) for one in sys.stdin.read().split()]
    for file in sys.argv[2:]:
        try:
            print(*greedy(file, text, int(sys.argv[1])), flush=True)
        except ValueError:
            print("error", flush=True)


if __name__ == "__main__":
    main()
