"""Time and memory of long texts by their length, compared with llama.cpp: prefill in chunks. JSON on the last line.

    python benchmarks/long.py                          a 30 M Llama shape at 1024, 4096, 16384 and 32768 positions
    python benchmarks/long.py --lengths 1024 4096
    python benchmarks/long.py --beside 0               without llama.cpp

llama.cpp (the package llama-cpp-python, a GGUF file of the same numbers in BF16, a thread for every core) reads the
same prompts up to ``--beside`` positions, and rows have no figure of it where the package is not installed.

Each length has a process of its own, whose peak memory above that of the loaded decoder with its cache is what the
prompt took. Attention looks at a chunk's rows against the cache in place, so that this does not grow with the square
of the length.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch
from common import child, llama_cpp, publish
from gguf import GGMLQuantizationType
from gguf_writer import write_gguf
from shapes import SHAPES, random_model

from paceline import AutoDecoder

LENGTHS = (1024, 4096, 16384, 32768)
BESIDE = 16384
"""Positions up to which llama.cpp reads, too: four times as many take it minutes."""

PEER = "peer.gguf"


def save_shape(folder: Path, positions: int) -> None:
    """A random Llama of 30 M parameters with that many positions."""
    model = random_model(SHAPES["30m"], folder, max_position_embeddings=positions)
    write_gguf(folder / PEER, model, GGMLQuantizationType.BF16)


def peak_mb() -> float:
    """The most memory this process has held. MB"""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, length: int) -> dict[str, float]:
    """Times of one prompt that fills all but the last of ``length`` positions."""
    decoder = AutoDecoder.from_pretrained(folder, n_positions=[length], context_length_estimate=[256])
    text = torch.randint(0, 8192, (1, length - 1), generator=torch.Generator().manual_seed(0))
    decoder.compile()
    decoder.sample(text[:, :300], 302)
    before = peak_mb()
    begin = perf_counter()
    decoder.sample(text, length)  # the prompt and one token
    seconds = perf_counter() - begin
    cache = sum(keys.nbytes + values.nbytes for keys, values in decoder.body.caches)
    return {
        "positions": length,
        "prefill_s": round(seconds, 3),
        "prefill_tokens_per_s": round((length - 1) / seconds, 1),
        "prompt_mb": round(peak_mb() - before, 1),
        "cache_mb": round(cache / 2**20, 1),
    }


def theirs(folder: Path, length: int) -> dict[str, float]:
    """Seconds of the same prompt with llama.cpp, in its default batches."""
    model = llama_cpp(folder / PEER, length)
    text = torch.randint(0, 8192, (length - 1,), generator=torch.Generator().manual_seed(0)).tolist()
    model.eval(text[:300])
    model.reset()
    begin = perf_counter()
    model.eval(text)
    return {"positions": length, "llama_cpp_s": round(perf_counter() - begin, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--beside", type=int, default=BESIDE, help="positions up to which llama.cpp reads, too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side = theirs if options.peer else measure
        print(json.dumps(side(Path(options.child), options.lengths[0])))
        return
    installed = find_spec("llama_cpp") is not None
    if options.beside and not installed:
        print("llama-cpp-python is not installed: nothing is measured beside")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_shape(Path(folder), max(options.lengths))
        found: dict[int, list[dict[str, float]]] = {length: [] for length in options.lengths}
        for _ in range(options.repeats):
            for length in options.lengths:
                asked = "--child", folder, "--lengths", str(length)
                row = child(*asked)
                if installed and length <= options.beside:
                    row |= child(*asked, "--peer")
                found[length].append(row)
        for each in found.values():
            rows.append({key: statistics.median(one[key] for one in each) for key in each[0]})
    publish({"long": rows})


if __name__ == "__main__":
    main()
