"""Every drafter of an experiment file in one table: tokens per round, time of a round, speed. JSON comes last.

    python benchmarks/modes.py benchmarks/experiments/modes.yaml                   greedy
    python benchmarks/modes.py benchmarks/experiments/modes.yaml --temperature 1   sampled
    python benchmarks/modes.py benchmarks/experiments/chat.yaml --transformers
    python benchmarks/modes.py benchmarks/experiments/modes.yaml --tiny            seconds: to try it out
    python benchmarks/modes.py benchmarks/experiments/adaptive.yaml --turns        drafters in turns, by batch size
    python benchmarks/modes.py benchmarks/experiments/adaptive.yaml --turns half   every other prompt suits no draft

Every drafter takes turns with plain decoding on every prompt; a figure is the median of the repeats. Texts are compared
with those of plain decoding: one that has other tokens is counted. Nothing else should run on the machine. Making
graphs is not measured. Other programs: benchmarks/peers.py.

With ``--turns`` all drafters of a batch size and a sampling take turns on one batch, and the one called auto is
compared with plain decoding and the best of the others. ``half``: every other prompt is random ids.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import publish

from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.hub import checkpoint_path
from paceline.experiments.bench import PLAIN, figures, run_cells, run_engine, transformers_engine
from paceline.experiments.config import Cell, ExperimentConfig, SamplingEntry, cells, load_config
from paceline.experiments.measure import Bench, run_group
from paceline.experiments.prompts import Prompts, load_prompts
from paceline.experiments.store import Row
from paceline.heads.frozen_model import transformers_model
from paceline.text.tokenizer import load_tokenizer


def by_category(found: Mapping[str, Sequence[Row]]) -> dict[str, object]:
    names = dict.fromkeys(row["category"] for row in found[PLAIN])
    return {
        name: {mode: figures([row for row in rows if row["category"] == name]) for mode, rows in found.items()}
        for name in (names if len(names) > 1 else ())
    }


def in_turns(config: ExperimentConfig, prompts: Prompts, *, half: bool) -> list[dict[str, object]]:
    """Tokens/s of every drafter on the first batch, the median of the repeats, by batch size and sampling."""
    found: list[dict[str, object]] = []
    groups: dict[tuple[int, float], list[Cell]] = {}
    for cell in cells(config):
        groups.setdefault((cell.batch_size, cell.sampling.temperature), []).append(cell)
    with Bench(config) as bench:
        for (size, temperature), group in groups.items():
            rows = list(prompts.rows[:size])
            params = bench.params(group[0], 0, size)
            if half:
                ids, size_of = random.Random(1), ModelConfig.from_pretrained(checkpoint_path(group[0].target.path))
                for row in range(1, size, 2):
                    junk = tuple(ids.randrange(size_of.vocab_size) for _ in rows[row].ids)
                    rows[row] = replace(rows[row], ids=junk)
            generators = {cell.drafter.label: bench.generator(cell, prompts) for cell in group}
            speeds: dict[str, list[float]] = {name: [] for name in generators}
            for turn in range(config.repeats + 1):
                for name, generator in generators.items():
                    run = run_group(generator, rows, params)
                    if turn:  # the first one warms up, and lets auto learn
                        speeds[name].append(run.statistics.new_tokens / run.seconds)
            middle = {name: round(statistics.median(seen), 1) for name, seen in speeds.items()}
            best = max((name for name in middle if name not in (PLAIN, "auto")), key=middle.__getitem__)
            cell_found: dict[str, object] = {"batch": size, "temperature": temperature, "speeds": middle, "best": best}
            cell_found["auto_over_plain"] = round(middle["auto"] / middle[PLAIN], 3)
            cell_found["auto_over_best"] = round(middle["auto"] / middle[best], 3)
            lengths = generators["auto"].statistics.draft_lengths
            cell_found["auto_lengths"] = {k: lengths.count(k) for k in sorted(set(lengths))}
            found.append(cell_found)
            print(cell_found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, help="with a drafter called plain, one target and one set of prompts")
    parser.add_argument("--transformers", action="store_true", help="also its `generate`, in bf16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--quantization", help="format of the weights of target and draft; default bf16")
    parser.add_argument("--kv-cache-dtype", help="format of their keys and values; default bf16")
    parser.add_argument("--turns", nargs="?", const="all", choices=("all", "half"), help="drafters take turns")
    parser.add_argument("--batch", type=int, nargs="*", help="batch sizes with --turns, in place of the file's")
    parser.add_argument("--tiny", action="store_true", help="one short prompt, once")
    options = parser.parse_args()
    config = load_config(options.experiment)
    formats = {"quantization": options.quantization, "kv_cache_dtype": options.kv_cache_dtype}
    given = {name: value for name, value in formats.items() if value is not None}
    changes: dict[str, Any] = {"load": {**config.load, **given}, "seed": 7}
    if options.batch:
        changes["batch_sizes"] = tuple(options.batch)
    if options.turns is None:
        changes["samplings"] = (SamplingEntry(temperature=options.temperature),)
    (asked,) = config.prompt_sets
    if options.tiny:
        changes |= {"max_new_tokens": 8, "repeats": 1}
        asked = asked.model_copy(update={"count": 1, "per_category": None})
    config = config.model_copy(update=changes)
    path = checkpoint_path(config.targets[0].path)
    prompts = load_prompts(asked, load_tokenizer(path), ModelConfig.from_pretrained(path).vocab_size)
    if options.turns is not None:
        publish({**formats, "turns": options.turns, "cells": in_turns(config, prompts, half=options.turns == "half")})
        return
    found = run_cells(config, prompts)
    if options.transformers:
        engine = transformers_engine(transformers_model(path, torch.bfloat16), None, config.max_new_tokens)
        found["transformers bf16"] = run_engine(engine, prompts, found[PLAIN])
    report = {"prompts": len(prompts.rows), "new_tokens": config.max_new_tokens, "temperature": options.temperature}
    modes = {name: figures(rows) for name, rows in found.items()}
    publish({**report, **formats, "modes": modes, "categories": by_category(found)})


if __name__ == "__main__":
    main()
