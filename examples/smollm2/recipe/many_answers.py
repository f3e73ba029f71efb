"""On a GPU: let the target write instructions, and answer these and the given ones, thousands at a time.

    python examples/smollm2/recipe/many_answers.py --target smollm2 --instructions train.jsonl --out conversations.bin

A chat model that is given the beginning of a user's turn and nothing else writes an instruction like those it was
trained on (Magpie, arXiv 2406.08464). What names a topic or module that is held out is dropped. The first instructions
are answered greedily into `OUT-eval.bin`, to measure on; the others go round the temperatures until the time is over.
Both files hold conversations end to end, as `answers.py` writes them. Needs a GPU for speed alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gpu_decoder import GpuDecoder, Prompt
from instructions import WORDS

from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import write_tokens
from paceline.heads.frozen_model import transformers_model
from paceline.text.chat import chat_ids
from paceline.text.tokenizer import load_tokenizer

ROOM, LONGEST_PROMPT = 512, 288
TEMPERATURES = (0.0, 0.7, 1.0)
COMMON_WORDS = {"json", "statistics"}  # held-out modules whose names are everyday words of a chat
_INSIDE = "\x00"


def own_instructions(decoder: GpuDecoder, tokenizer: Any, count: int) -> list[str]:
    """Instructions that the model writes itself: 10 to 900 characters, each once, none that names what is held out."""
    chat = [{"role": "user", "content": _INSIDE}]
    before = tokenizer.apply_chat_template(chat, tokenize=False).split(_INSIDE)[0]
    ids = tokenizer.encode(before, add_special_tokens=False)
    held_out = [*WORDS["held_out_topics"], *(word for word in WORDS["held_out_modules"] if word not in COMMON_WORDS)]
    texts = decoder.texts([Prompt(ids, 0.9, 120)] * count)
    ended = [text[len(ids) : -1] for text in texts if text[-1] == tokenizer.eos_token_id]
    found = {text.strip() for text in tokenizer.batch_decode(ended, skip_special_tokens=True)}
    return sorted(
        text for text in found if 10 <= len(text) <= 900 and not any(word.lower() in text.lower() for word in held_out)
    )


def rounds(prompts: Sequence[list[int]], new: int) -> Iterator[Prompt]:
    """Every prompt at one temperature, then every prompt at the next one, for ever."""
    turn = 0
    while True:
        for index, ids in enumerate(prompts):
            yield Prompt(ids, TEMPERATURES[(index + turn) % len(TEMPERATURES)], new)
        turn += 1


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--instructions", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", type=int, default=40_000, help="instructions that the model is asked to write")
    parser.add_argument("--new", type=int, default=224, help="tokens of an answer, at most")
    parser.add_argument("--held-back", type=int, default=96, help="instructions to measure on")
    parser.add_argument("--minutes", type=float, default=3.0, help="begin no more answers after so long")
    parser.add_argument("--rows", type=int, default=2048, help="texts at a time")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    began = perf_counter()
    tokenizer: Any = load_tokenizer(options.target)
    vocab_size = ModelConfig.from_pretrained(options.target).vocab_size
    model = transformers_model(options.target, torch.bfloat16).to(options.device)
    torch.manual_seed(0)
    decoder = GpuDecoder(model, rows=options.rows, room=ROOM, end=tokenizer.eos_token_id)
    asked = [json.loads(line)["prompt"] for line in options.instructions.read_text().splitlines()]
    own = own_instructions(decoder, tokenizer, options.own) if options.own else []
    print(f"{len(own)} instructions of its own, {perf_counter() - began:.0f} s", flush=True)
    asked += own
    random.Random(0).shuffle(asked)
    prompts = [chat_ids(tokenizer, [{"role": "user", "content": text}]) for text in asked]
    prompts = [ids for ids in prompts if len(ids) <= LONGEST_PROMPT]
    held_back, prompts = prompts[: options.held_back], prompts[options.held_back :]
    texts = decoder.texts([Prompt(ids, 0.0, options.new) for ids in held_back])
    write_tokens(options.out.with_name(f"{options.out.stem}-eval.bin"), texts, vocab_size=vocab_size)
    made: list[list[int]] = []
    endless = rounds(prompts, options.new)
    while perf_counter() - began < 60 * options.minutes:
        made += decoder.texts([next(endless) for _ in range(8 * options.rows)])
        print(f"{len(made)} answers, {sum(map(len, made))} tokens, {perf_counter() - began:.0f} s", flush=True)
    size = write_tokens(options.out, made, vocab_size=vocab_size)
    print(json.dumps({"conversations": len(made), "tokens": size, "instructions": len(prompts), "own": len(own)}))


if __name__ == "__main__":
    main()
