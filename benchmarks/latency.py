"""Time to 1024 tokens from prompts of 256, 512 and 768: plain, and in every mode. JSON on the last line.

    python benchmarks/latency.py                          the demo's target
    python benchmarks/latency.py --model smollm2 --modes "plain; suffix 6; medusa tree-8" --prompts 256
    python benchmarks/latency.py --tiny                   seconds: short texts and two modes, to try it out

The protocol of AWS's reports of latency: batch 1, a fixed length of prompt and answer together, greedy, from the call
to the last token. A prompt is a run of this package's sources; a text that would end earlier goes on. Modes are those
of benchmarks/modes.py, which take turns; a figure is the median of the repeats. Every mode's tokens are compared with
the first one's: ``same_tokens``. Nothing else should run on the machine. Making graphs is not measured.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from common import ROOT, publish
from modes import MODELS, Model, generator

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.decoder.weights.hub import checkpoint_path
from paceline.text.tokenizer import load_tokenizer

MODES = {
    "pycode": "plain; ngram 4; suffix 6; fused 2; fused 3; fused 4; pair 3; suffix 6 + pair 3; eagle3 chain:2; "
    "eagle3 dynamic:8,4,3; medusa tree-2",
    "smollm2": "plain; ngram 4; suffix 6; fused 3; medusa tree-8; eagle3 chain:3",
}


@dataclass(slots=True)
class Side:
    """A mode, and what it took: seconds of each repeat by length of the prompt."""

    name: str
    made: SpeculativeGenerator
    seconds: dict[int, list[float]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)

    def run(self, prompt: list[int], total: int, *, counts: bool) -> None:
        """One text of ``total`` tokens, prompt included."""
        begin = perf_counter()
        made = self.made.sample([prompt], total, eos_token_id=[])
        seconds = perf_counter() - begin
        assert isinstance(made, torch.Tensor) and made.shape == (1, total), "a text of that length was asked for"
        if counts:
            self.seconds.setdefault(len(prompt), []).append(seconds)
            self.prefill.setdefault(len(prompt), []).append(self.made.statistics.prefill_seconds)
            self.texts[len(prompt)] = made[0].tolist()

    def summary(self, first: Side, total: int) -> dict[str, object]:
        """By length of the prompt."""
        rows: dict[str, object] = {}
        for length, times in self.seconds.items():
            seconds = statistics.median(times)
            prefill = statistics.median(self.prefill[length])
            rows[str(length)] = {
                "seconds": round(seconds, 4),
                "prefill_ms": round(1e3 * prefill, 2),
                "ms_per_token": round(1e3 * (seconds - prefill) / max(1, total - length - 1), 4),
                "speed_up": round(statistics.median(first.seconds[length]) / seconds, 3),
                "same_tokens": self.texts[length] == first.texts[length],
            }
        return rows


def prompt_of(path: Path, length: int) -> list[int]:
    """The first tokens of this package's sources."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "core").glob("*.py")))
    return load_tokenizer(path).encode(text)[:length]


def sides(model: Model, names: list[str], *, total: int, longest: int) -> list[Side]:
    """The modes, compiled."""
    lengths = {"n_positions": total, "context_length_estimate": [min(256, longest)]}
    target = AutoDecoder.from_pretrained(model.target, **lengths)
    drafting = any(part.strip().startswith(("pair", "fused")) for name in names for part in name.split("+"))
    draft = AutoDecoder.from_pretrained(model.folder / "draft", **lengths) if drafting else None
    made = [Side(name, generator(name, model, target, draft)) for name in names]
    for side in made:
        side.made.compile()
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="pycode")
    parser.add_argument("--modes", help="with semicolons between; _ stands for a space")
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 512, 768], help="lengths of prompts")
    parser.add_argument("--total", type=int, default=1024, help="tokens of prompt and answer together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="64 tokens from 16 and 32, two modes, one repeat")
    options = parser.parse_args()
    if options.tiny:
        options.prompts, options.total, options.repeats = [16, 32], 64, 1
        options.modes = options.modes or "plain; ngram 4"
    if max(options.prompts) >= options.total:
        parser.error(f"a prompt of {max(options.prompts)} tokens leaves none of {options.total} to generate")
    listed = (options.modes or MODES[options.model]).split(";")
    names = [one.replace("_", " ").strip() for one in listed]
    model = MODELS[options.model]
    modes = sides(model, names, total=options.total, longest=max(options.prompts))
    for length in options.prompts:
        prompt = prompt_of(checkpoint_path(model.target), length)
        for turn in range(options.repeats + 1):  # the first is not counted
            for side in modes:
                side.run(prompt, options.total, counts=turn > 0)
    report = {"model": options.model, "total_tokens": options.total, "repeats": options.repeats}
    publish({**report, "modes": {side.name: side.summary(modes[0], options.total) for side in modes}})


if __name__ == "__main__":
    main()
