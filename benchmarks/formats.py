"""Decode, verify and prefill in every weight format, compared with llama.cpp. JSON on the last line.

    python benchmarks/formats.py --shape 30m                        random weights: 30m, 110m or 1.1b
    python benchmarks/formats.py --shape 8x2 --formats bf16         a mixture of 8 experts, 2 a token; 128x8
    python benchmarks/formats.py --shape smollm2                    the fetched model
    python benchmarks/formats.py --shape 1.1b --formats bf16 int8 --llama DIR --beside q8_0
    python benchmarks/formats.py --shape tiny --repeats 3           seconds, to try it out

decode[1], verify[5] and verify[9] are windows of 1, 5 and 9 rows behind 100 tokens of text, with the choice of their
tokens; prefill is a prompt of 256 tokens. No token comes twice, so that the rows of a mixture choose experts of their
own. All take turns; a figure is the median in milliseconds. transformers runs the same weights with its own kind of
cache, its windows with logits of every row, its prompt with those of the last; it takes every fourth turn only, for it
needs the most time. ``read`` sums every word of the matrices that a token needs (of experts as many as it chooses), in
order: the time to read them from memory. llama.cpp's times are those of llama-bench (--llama; `make peers` builds it),
on a GGUF file of the same shape with random weights, written here: its windows have logits of the last row only, and it
takes every fourth turn too. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import torch
from common import publish
from gguf_writer import write_gguf
from shapes import POSITIONS, SHAPES, TEXT, distinct, random_model, window
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from paceline import AutoDecoder
from paceline.auto import SamplingDecoder
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.decoder import environment
from paceline.decoder.weights.hub import checkpoint_path
from paceline.huggingface.adapter import CACHE_FIELD

Runs = dict[str, Callable[[], object]]

PROMPT, WINDOWS = 256, (1, 5, 9)
FORMATS = ("bf16", "int8", "fp8_e4m3", "q8_0", "q4_0", "q4_1")
BESIDE = ("bf16", "q8_0", "q4_1")
TRANSFORMERS = {"bf16": torch.bfloat16, "f32": torch.float32}
RIVALS = ("llama.cpp", "transformers")
_SELDOM = 4  # of so many turns, slow sides take one
_SETTLE_S = 0.02  # OpenMP's threads spin for up to 11 ms


def ours(path: Path, form: str) -> Runs:
    """The graphs of one format, and what reading its matrices takes."""
    plain = form in ("bf16", "f32")
    decoder = AutoDecoder.from_pretrained(
        path,
        n_positions=[POSITIONS],
        context_length_estimate=[PROMPT],
        amp=form if plain else "bf16",
        quantization=None if plain else form,
    )
    greedy = sampling_tensors([Sampling()])
    runs: Runs = {f"verify{width}": partial(window(decoder, width), greedy) for width in WINDOWS}
    runs["decode1"] = runs.pop("verify1")
    prompt = [distinct(PROMPT, decoder.config.vocab_size)]
    runs["prefill"] = lambda: decoder.sample(prompt, max_new_tokens=1)
    matrices = [(name, one) for name, one in decoder.body.named_parameters() if one.dim() == 2]
    streams = [_words(_needed(decoder, name, one.detach())) for name, one in matrices if "embedding" not in name]
    runs["read"] = lambda: [stream.sum(dtype=torch.int32) for stream in streams]
    return runs


def _needed(decoder: SamplingDecoder, name: str, matrix: Tensor) -> Tensor:
    """The part of the weights that a token reads: of the experts, only the active ones."""
    config = decoder.config
    mixture = config.blueprint.experts
    if mixture is None or ".experts." not in name:
        return matrix
    return matrix[: len(matrix) // mixture.count * mixture.chosen]


def _words(matrix: Tensor) -> Tensor:
    """Its bytes as words, but for a rest: torch.sum over int32 is the plainest loop that touches all in order."""
    flat = matrix.contiguous().view(torch.uint8).flatten()
    return flat[: len(flat) // 4 * 4].view(torch.int32)


def of_llama_cpp(program: Path, file: Path) -> dict[str, float]:
    """Milliseconds of the same calls, as llama-bench reports them."""
    calls = {"decode1": ("-p", "0", "-n", "32", "-d", str(TEXT)), "prefill": ("-p", str(PROMPT), "-n", "0")}
    calls |= {f"verify{width}": ("-p", str(width), "-n", "0", "-d", str(TEXT)) for width in WINDOWS[1:]}
    found, threads = {}, str(environment.threads(environment.cores()))
    for call, asked in calls.items():
        command = [str(program), "-m", str(file), "-t", threads, "-o", "json", *asked]
        (row,) = json.loads(subprocess.check_output(command))
        found[call] = row["avg_ns"] / 1e6 / max(1, row["n_gen"])
    return found


def of_transformers(model: Any) -> Runs:
    """The same of transformers, which computes in the type of the model's weights."""
    vocabulary = model.config.vocab_size
    text: list[Any] = []

    @torch.inference_mode()
    def step(tokens: list[int], cache: DynamicCache, *, keep: int) -> None:
        model(torch.tensor([tokens]), use_cache=True, logits_to_keep=keep, **{CACHE_FIELD: cache})

    def prefill() -> None:  # and leaves a text of which the windows see the beginning
        text[:] = [DynamicCache(config=model.config)]
        step(distinct(PROMPT, vocabulary), text[0], keep=1)

    def rows(width: int) -> Callable[[], None]:
        def run() -> None:
            text[0].crop(TEXT - text[0].get_seq_length())
            step(distinct(width, vocabulary), text[0], keep=0)

        return run

    prefill()
    runs: Runs = {f"verify{width}": rows(width) for width in WINDOWS}
    runs["decode1"] = runs.pop("verify1")
    return {**runs, "prefill": prefill}


def in_turns(
    sides: dict[str, Runs], whole: dict[str, Callable[[], dict[str, float]]], repeats: int, seconds: float
) -> dict[str, dict[str, float]]:
    """Median milliseconds by side and call. Every call takes its turn until the time is over, three times at least, and
    one more that does not count. Sides that time all their calls at once, and transformers, come seldom.
    """
    times: dict[str, dict[str, list[float]]] = {name: {call: [] for call in runs} for name, runs in sides.items()}
    end = perf_counter() + seconds
    for turn in range(repeats + 1):
        if turn > 3 and perf_counter() > end:
            break
        seldom = turn > 1 and turn % _SELDOM != 1
        for call in ("prefill", "read", "decode1", *(f"verify{width}" for width in WINDOWS[1:])):
            for name, runs in sides.items():
                if call not in runs or (seldom and name.startswith("transformers")):
                    continue
                _settle(runs[call])
                for _ in range(1 if call == "prefill" else 4):
                    begin = perf_counter()
                    runs[call]()
                    if turn:
                        times[name][call].append(1e3 * (perf_counter() - begin))
        for name, run in whole.items():
            if turn and not seldom:
                for call, one in run().items():
                    times.setdefault(name, {}).setdefault(call, []).append(one)
    return {
        name: {call: round(statistics.median(found), 3) for call, found in calls.items() if found}
        for name, calls in times.items()
    }


def _settle(run: Callable[[], object]) -> None:
    """Run a call without timing it until the threads of the side before sleep and its own are awake."""
    end = perf_counter() + _SETTLE_S
    run()
    while perf_counter() < end:
        run()


def ratios(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ratios of the goals: decode over reading the weights, verify over decode, and decode over that of bf16."""
    made: dict[str, dict[str, float]] = {}
    for name, row in times.items():
        if "decode1" not in row:
            continue
        made[name] = {f"verify{w}_over_decode1": round(row[f"verify{w}"] / row["decode1"], 3) for w in WINDOWS[1:]}
        if "read" in row:
            made[name]["decode1_over_read"] = round(row["decode1"] / row["read"], 3)
        if "bf16" in times and not name.startswith(RIVALS):
            made[name]["decode1_over_bf16"] = round(row["decode1"] / times["bf16"]["decode1"], 3)
        for rival in RIVALS:
            theirs = times.get(f"{rival} {name}", {})
            made[name] |= {f"{call}_over_{rival}": round(row[call] / theirs[call], 3) for call in row if call in theirs}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "smollm2"], default="30m")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=["bf16", "int8", "q4_1"])
    parser.add_argument("--llama", type=Path, help="folder of llama-bench")
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=list(BESIDE), help="llama.cpp's formats")
    parser.add_argument("--transformers", nargs="*", choices=TRANSFORMERS, default=list(TRANSFORMERS), help="its types")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=120.0, help="time for the turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if options.shape == "smollm2":
            path = checkpoint_path("smollm2")
            model: Any = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        else:
            path = folder / "model"
            model = random_model(SHAPES[options.shape], path)
        sides: dict[str, Runs] = {}
        whole: dict[str, Callable[[], dict[str, float]]] = {}
        for form in options.beside if options.llama is not None else ():
            file = folder / f"{form}.gguf"
            kind = {"bf16": "BF16", "q8_0": "Q8_0", "q4_1": "Q4_1"}[form]
            write_gguf(file, model, gguf.GGMLQuantizationType[kind])
            whole[f"llama.cpp {form}"] = partial(of_llama_cpp, options.llama / "llama-bench", file)
        for form in options.transformers:
            sides[f"transformers {form}"] = of_transformers(copy.deepcopy(model).to(TRANSFORMERS[form]).eval())
        del model
        for form in options.formats:
            sides[form] = ours(path, form)
        times = in_turns(sides, whole, options.repeats, options.seconds)
    # int8's rival is llama.cpp's format of 8 bits.
    compared = {**times, **({"llama.cpp int8": times["llama.cpp q8_0"]} if "llama.cpp q8_0" in times else {})}
    found = ratios(compared)
    found.pop("llama.cpp int8", None)
    publish({"shape": options.shape, "ms": times, "ratios": found})


if __name__ == "__main__":
    main()
