"""Medusa on the demo target: time of a round against the size of the tree, tokens a round, speed. JSON comes last.

    python benchmarks/medusa.py                            greedy
    python benchmarks/medusa.py --temperature 1            sampled
    python benchmarks/medusa.py --trees 8,16 --prompts 4   less of it

Every mode takes its turn on every prompt; a figure is the median of the repeats. Plain decoding and a draft model, in
two graphs and in one, run beside the trees. Texts are compared: a mode that gives other tokens is counted.
Nothing else should run on the machine. Compiling (about 15 seconds a mode, once) is not measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoTokenizer

from paceline import AutoDecoder, MedusaDrafter, SpeculativeGenerator
from paceline.result import GenerationResult, Statistics

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples" / "pycode"


@dataclass
class Mode:
    """A way to decode: for every prompt its text, its counts, and the seconds of every repeat."""

    generator: SpeculativeGenerator
    nodes: int
    texts: list[list[int]] = field(default_factory=list)
    counts: list[Statistics] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)

    def run(self, ids: list[int], law: dict[str, object], *, new: int, turn: int) -> None:
        begin = perf_counter()
        made = self.generator.sample([ids], max_new_tokens=new, return_dict=True, **law)  # type: ignore[arg-type]
        seconds = perf_counter() - begin
        assert isinstance(made, GenerationResult)
        if not turn:
            self.texts.append(made.sequences[0, len(ids) :].tolist())
            self.counts.append(made.statistics)
            self.seconds.append([])
            self.rounds.append([])
        self.seconds[-1].append(seconds)
        spent = made.statistics.verify_seconds + made.statistics.draft_seconds
        self.rounds[-1].append(1e3 * spent / made.statistics.rounds)

    def summary(self, plain: Mode) -> dict[str, object]:
        """Plain values."""
        rounds, accepted = (sum(getattr(one, name) for one in self.counts) for name in ("rounds", "accepted"))
        return {
            "nodes": self.nodes,
            "tau": round(1 + accepted / rounds, 3),
            "ms_per_round": round(statistics.median(statistics.median(one) for one in self.rounds), 3),
            "tokens_per_second": round(self.speed(), 1),
            "over_plain": round(self.speed() / plain.speed(), 3),
            "fastest_over_slowest_repeat": round(statistics.median(max(one) / min(one) for one in self.seconds), 3),
            "texts_unlike_plain": sum(a != b for a, b in zip(self.texts, plain.texts, strict=True)),
        }

    def speed(self) -> float:
        """New tokens of all prompts over the sum of their median times, prefill included."""
        return sum(map(len, self.texts)) / sum(statistics.median(one) for one in self.seconds)


def modes(sizes: list[int], k: int) -> dict[str, Mode]:
    """Plain, a draft model in two graphs and in one, Medusa's trees; those of 2 and 4 nodes are chains."""
    target, draft = (
        AutoDecoder.from_pretrained(PAIR / name, n_positions=512, context_length_estimate=128)
        for name in ("target", "draft")
    )
    made = {
        "plain": Mode(SpeculativeGenerator(None, target, k=0), 0),
        f"draft model, two graphs, k = {k}": Mode(SpeculativeGenerator(draft, target, k=k, fused=False), k),
        f"draft model, one graph, k = {k}": Mode(SpeculativeGenerator(draft, target, k=k), k),
    }
    for size in sizes:
        drafter = MedusaDrafter.from_pretrained(PAIR / "medusa", target, tree=PAIR / "medusa" / f"tree-{size}.json")
        made[f"medusa, tree of {size}"] = Mode(SpeculativeGenerator(drafter, target), size)
    for mode in made.values():
        mode.generator.compile()
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", default="2,4,8,16,32,64", help="sizes of the trees of examples/pycode/medusa")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--k", type=int, default=4)
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    lines = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer(line).input_ids for line in lines[:: max(1, len(lines) // asked.prompts)][: asked.prompts]]
    law = {"do_sample": True, "temperature": asked.temperature, "seed": 7} if asked.temperature else {}
    made = modes([int(size) for size in asked.trees.split(",")], asked.k)
    for ids in prompts:
        for turn in range(asked.repeats):
            for mode in made.values():
                mode.run(ids, law, new=asked.new, turn=turn)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": [platform.machine(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()],
        "prompts": len(prompts),
        "new_tokens": asked.new,
        "temperature": asked.temperature,
        "modes": {name: mode.summary(made["plain"]) for name, mode in made.items()},
    }
    print(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
