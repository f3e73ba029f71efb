"""Have the target write texts to train heads on: half of them greedily, half at temperature 1.

    python examples/pycode/eagle_recipe/own_text.py --target examples/pycode/target --data train.bin --out own.bin

Each text is 64 tokens of the data and the target's continuation up to 256. It writes token ids, end to end; a
run that was stopped continues where it was.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np

from paceline import AutoDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import append_tokens, read_tokens, write_tokens

PROMPT, LENGTH, SLOTS = 64, 256, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="file of token ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=5.0, help="stop after so long")
    options = parser.parse_args()
    vocab_size = ModelConfig.from_pretrained(options.target).vocab_size
    stream = read_tokens(options.data, vocab_size)
    places = np.random.default_rng(1).permutation(len(stream) // LENGTH)[: options.texts] * LENGTH
    if not options.out.exists():
        write_tokens(options.out, [], vocab_size=vocab_size)
    done = len(read_tokens(options.out, vocab_size)) // LENGTH
    target = AutoDecoder.from_pretrained(
        options.target, batch_size=SLOTS, n_positions=LENGTH, context_length_estimate=PROMPT
    )
    began = perf_counter()
    while done < options.texts and perf_counter() - began < 60 * options.minutes:
        which = range(done, min(done + SLOTS, options.texts))
        prompts = [stream[places[i] : places[i] + PROMPT].astype(np.int64).tolist() for i in which]
        greedy = done // SLOTS % 2 == 0
        texts = target.sample(prompts, LENGTH, do_sample=not greedy, temperature=1.0, seed=done, eos_token_id=[])
        append_tokens(options.out, np.asarray(texts))
        done += len(prompts)
        print(f"{done} of {options.texts} texts, {perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
