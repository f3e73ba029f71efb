"""What it costs to sample from a large vocabulary: one token of a random Llama, by kind of sampling. JSON comes last.

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
from collections.abc import Callable
from time import perf_counter

import torch
from common import publish
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import AutoDecoder
from paceline.core.acceptance.match import Match
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Commit, DraftShape, Proposal, RoundLimits
from paceline.target.verifier import CompiledVerifier

KINDS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(1.0, seed=1),
    "temperature 0.7": Sampling(0.7, seed=1),
    "top-k 50": Sampling(1.0, top_k=50, seed=1),
    "top-k 50, top-p 0.9": Sampling(1.0, top_k=50, top_p=0.9, seed=1),
    "top-p 0.9": Sampling(1.0, top_p=0.9, seed=1),
    "min-p 0.05": Sampling(1.0, min_p=0.05, seed=1),
}


def verifier(options: argparse.Namespace) -> CompiledVerifier:
    """Of a model with random weights."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 256),
        intermediate_size=options.width * 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        decoder = AutoDecoder.from_pretrained(folder, n_positions=512)
    return CompiledVerifier(decoder, DraftShape.chain(options.rows - 1), rule=Match(), wide=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    verify, count = verifier(options), options.rows - 1
    tokens = torch.full((1, options.rows), -1, dtype=torch.int32)
    tokens[0, 0] = 7
    one = torch.ones(1, dtype=torch.int32)
    commit, limits = Commit(tokens, one, one * 100), RoundLimits((one * count).tolist(), 101)
    proposal = Proposal(torch.full((1, count), 9, dtype=torch.int32)) if count else None

    def run(sampling: Sampling) -> Callable[[], object]:
        tensors = sampling_tensors([sampling])
        return lambda: verify(commit, proposal, tensors, limits)

    runs = {name: run(sampling) for name, sampling in KINDS.items()}
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
