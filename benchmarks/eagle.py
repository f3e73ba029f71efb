"""EAGLE on the demo target: tokens a round and speed of chains and trees, beside every other mode. JSON comes last.

    python benchmarks/eagle.py                            greedy
    python benchmarks/eagle.py --temperature 1            sampled
    python benchmarks/eagle.py --growths chain:3 --prompts 4 --repeats 2   less of it

Every mode takes its turn on every prompt; a figure is the median of the repeats. Texts are compared with plain
decoding's: a mode that gives other tokens is counted. Nothing else should run on the machine. Compiling (15 to 40
seconds a mode, once) is not measured.
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

from paceline import AutoDecoder, EagleDrafter, MedusaDrafter, SpeculativeGenerator
from paceline.eagle import spec
from paceline.result import GenerationResult, Statistics

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples" / "pycode"


@dataclass
class Mode:
    """A way to decode: for every prompt its text, its counts, and the seconds of every repeat."""

    generator: SpeculativeGenerator
    texts: list[list[int]] = field(default_factory=list)
    counts: list[Statistics] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)

    def run(self, ids: list[int], law: dict[str, object], *, new: int, turn: int) -> None:
        begin = perf_counter()
        made = self.generator.sample([ids], max_new_tokens=new, return_dict=True, **law)  # type: ignore[arg-type]
        seconds = perf_counter() - begin
        assert isinstance(made, GenerationResult)
        if not turn:
            self.texts.append(made.sequences[0, len(ids) :].tolist())
            self.counts.append(made.statistics)
            self.seconds.append([])
        self.seconds[-1].append(seconds)

    def summary(self, plain: Mode) -> dict[str, object]:
        """Plain values. ``by_position``: of all rounds, the share in which so many drafts were accepted."""
        rounds, accepted = (sum(getattr(one, name) for one in self.counts) for name in ("rounds", "accepted"))
        depth = max(len(one.accepted_per_position) for one in self.counts)
        places = [[*one.accepted_per_position, *[0] * depth][:depth] for one in self.counts]
        return {
            "nodes": self.generator.drafter.outline.nodes,
            "tau": round(1 + accepted / rounds, 3),
            "by_position": [round(sum(column) / rounds, 2) for column in zip(*places, strict=True)],
            "tokens_per_second": round(self.speed(), 1),
            "over_plain": round(self.speed() / plain.speed(), 3),
            "fastest_over_slowest_repeat": round(statistics.median(max(one) / min(one) for one in self.seconds), 3),
            "texts_unlike_plain": sum(a != b for a, b in zip(self.texts, plain.texts, strict=True)),
        }

    def speed(self) -> float:
        """New tokens of all prompts over the sum of their median times, prefill included."""
        return sum(map(len, self.texts)) / sum(statistics.median(one) for one in self.seconds)


def modes(growths: list[str], heads: list[str], ks: list[int]) -> dict[str, Mode]:
    """Plain, a draft model in one graph, Medusa's tree where it is there, and EAGLE's heads with every growth."""
    target, draft = (
        AutoDecoder.from_pretrained(PAIR / name, n_positions=512, context_length_estimate=128)
        for name in ("target", "draft")
    )
    made = {"plain": Mode(SpeculativeGenerator(None, target))}
    for k in ks:
        made[f"draft model, k = {k}"] = Mode(SpeculativeGenerator(draft, target, k=k))
    if (PAIR / "medusa").is_dir():
        made["medusa, its own tree"] = Mode(
            SpeculativeGenerator(MedusaDrafter.from_pretrained(PAIR / "medusa", target), target)
        )
    for head in heads:
        for text in growths:
            kind, _, rest = text.partition(":")
            growth = spec.growth(kind, k=int(rest)) if kind == "chain" else spec.growth(text, k=0)
            drafter = EagleDrafter.from_pretrained(PAIR / head, target, growth)
            made[f"{head}, {growth.name}"] = Mode(SpeculativeGenerator(drafter, target))
    for mode in made.values():
        mode.generator.compile()
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growths", default="chain:2;chain:3;chain:4;dynamic:4,3,2;dynamic:8,4,3")
    parser.add_argument("--heads", default="eagle3", help="folders of examples/pycode, with commas between")
    parser.add_argument("--k", default="4", help="of the draft model, with commas between; '' = leave it out")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    lines = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer(line).input_ids for line in lines[:: max(1, len(lines) // asked.prompts)][: asked.prompts]]
    law = {"do_sample": True, "temperature": asked.temperature, "seed": 7} if asked.temperature else {}
    ks = [int(k) for k in asked.k.split(",") if k]
    made = modes(asked.growths.split(";"), asked.heads.split(","), ks)
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
