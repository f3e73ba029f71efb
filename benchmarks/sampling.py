"""Cost of sampling from a large vocabulary: one token of a random Llama, by sampling mode. JSON comes last.

    python benchmarks/sampling.py                      128,256 ids, width 2048, 4 layers, bf16
    python benchmarks/sampling.py --width 576          a smaller model, where the choice of a token weighs more
    python benchmarks/sampling.py --rows 5             verifying four drafted tokens

Every kind takes its turn in every repeat; a figure is the median, and the ratio is to greedy. Most of the time of the
layers of a real model is left out here, so that the ratios are above those of a whole model. Nothing else should run
on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

from common import publish
from shapes import POSITIONS, random_model, window

from paceline import AutoDecoder
from paceline.core.sampling import Sampling, sampling_tensors

KINDS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(1.0, seed=1),
    "temperature 0.7": Sampling(0.7, seed=1),
    "top-k 50": Sampling(1.0, top_k=50, seed=1),
    "top-k 50, top-p 0.9": Sampling(1.0, top_k=50, top_p=0.9, seed=1),
    "top-p 0.9": Sampling(1.0, top_p=0.9, seed=1),
    "min-p 0.05": Sampling(1.0, min_p=0.05, seed=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    heads = options.width // 64
    shape = (options.vocabulary, options.width, options.layers, heads, max(1, heads // 4), options.width * 4)
    with tempfile.TemporaryDirectory() as folder:
        random_model(shape, Path(folder), tie_word_embeddings=True)
        decoder = AutoDecoder.from_pretrained(folder, n_positions=POSITIONS)
    verify = window(decoder, options.rows)
    runs = {name: partial(verify, sampling_tensors([sampling])) for name, sampling in KINDS.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.repeats + 3):
        for name, each in runs.items():
            begin = perf_counter()
            each()
            if turn >= 3:
                times[name].append(1e3 * (perf_counter() - begin))
    medians = {name: statistics.median(each) for name, each in times.items()}
    over = {
        name: statistics.median(a / b for a, b in zip(each, times["greedy"], strict=True))
        for name, each in times.items()
    }
    kinds = {name: {"ms": round(medians[name], 3), "over_greedy": round(over[name], 4)} for name in runs}
    publish({key: getattr(options, key) for key in ("vocabulary", "width", "layers", "rows")} | {"kinds": kinds})


if __name__ == "__main__":
    main()
