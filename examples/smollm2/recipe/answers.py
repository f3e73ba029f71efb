"""Have the target answer instructions; the conversations, as token ids, are what its drafters learn from.

    python examples/smollm2/recipe/answers.py --target smollm2 --instructions train.jsonl --out answers.bin

Every third answer is greedy, the others at temperature 0.7 and 1. A conversation is the chat template's prompt, the
answer and the end of the turn, end to end with the next one. A run that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter

from paceline import AutoDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import append_tokens, write_tokens
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.outputs import GenerationResult
from paceline.text.chat import chat_ids
from paceline.text.tokenizer import load_tokenizer

SLOTS, LONGEST_PROMPT, ROOM = 16, 320, 576
CALL = 8 * SLOTS  # instructions of one call: a slot whose answer has ended takes the next one
TEMPERATURES = (0.0, 0.7, 1.0)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--instructions", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new", type=int, default=224, help="tokens of an answer, at most")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after so long")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.target)
    rows = [json.loads(line)["prompt"] for line in options.instructions.read_text().splitlines()]
    vocab_size = ModelConfig.from_pretrained(options.target).vocab_size
    progress = options.out.with_suffix(".json")
    if not progress.exists():
        write_tokens(options.out, [], vocab_size=vocab_size)
        save(progress, done=0, size=options.out.stat().st_size)
    state = json.loads(progress.read_text())
    with options.out.open("r+b") as file:
        file.truncate(state["bytes"])  # what a stopped run wrote behind its last note is made again
    target = AutoDecoder.from_pretrained(
        options.target, batch_size=SLOTS, n_positions=ROOM, context_length_estimate=LONGEST_PROMPT
    )
    began, done, written = perf_counter(), state["instructions"], 0
    while done < len(rows) and perf_counter() - began < 60 * options.minutes:
        chats = [[{"role": "user", "content": row}] for row in rows[done : done + CALL]]
        prompts = [ids for chat in chats if len(ids := chat_ids(tokenizer, chat)) <= LONGEST_PROMPT]
        heat = TEMPERATURES[done // CALL % len(TEMPERATURES)]
        sampling = {"do_sample": True, "temperature": heat} if heat else {}
        made = target.sample(prompts, max_new_tokens=options.new, seed=done, return_dict=True, **sampling)
        assert isinstance(made, GenerationResult)
        for text, length in zip(made.sequences, made.lengths, strict=True):
            append_tokens(options.out, text[:length])  # what is behind it fills the row
            written += length
        done = min(done + CALL, len(rows))
        save(progress, done=done, size=options.out.stat().st_size)
        print(f"{done} of {len(rows)} instructions, {written} tokens, {perf_counter() - began:.0f} s", flush=True)


def save(progress: Path, *, done: int, size: int) -> None:
    """Note how many instructions were answered, and how many bytes of answers they made."""
    save_bytes(progress, [json.dumps({"instructions": done, "bytes": size}).encode()])


if __name__ == "__main__":
    main()
