"""Extract the answers from conversations, for `suffix:corpus=FILE`.

    python examples/smollm2/recipe/corpus.py --target smollm2 --data answers.bin --out examples/smollm2/answers.bin

Prompts are left out, since the target writes none. Answers stand end to end, each with the end of its turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import read_tokens, write_tokens
from paceline.decoder.weights.hub import checkpoint_path
from paceline.text.tokenizer import load_tokenizer


def answers(tokens: list[int], start: list[int], end: int) -> list[list[int]]:
    """Tokens between ``start``, with which the template begins an answer, and ``end``, which is kept."""
    found, at, width = [], 0, len(start)
    while at < len(tokens):
        if tokens[at : at + width] != start:
            at += 1
            continue
        begin = at = at + width
        while at < len(tokens) and tokens[at] not in (end, start[0]):
            at += 1
        found.append([*tokens[begin:at], end])
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="token ids, as answers.py writes them")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    path = checkpoint_path(options.target)
    tokenizer, size = load_tokenizer(path), ModelConfig.from_pretrained(path).vocab_size
    start = tokenizer.encode("<|im_start|>assistant\n")
    (end,) = tokenizer.encode("<|im_end|>")
    found = answers(read_tokens(options.data, size).tolist(), start, end)
    print(f"{len(found)} answers, {write_tokens(options.out, found, vocab_size=size)} tokens")


if __name__ == "__main__":
    main()
