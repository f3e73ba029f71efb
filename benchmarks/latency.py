"""Time to 1024 tokens from prompts of 256, 512 and 768: plain, and with every drafter. JSON on the last line.

    python benchmarks/latency.py          the drafters of benchmarks/experiments/latency.yaml
    python benchmarks/latency.py --tiny   seconds: short texts, one repeat, to try it out

The protocol of AWS's reports of latency: batch 1, a fixed length of prompt and answer together, greedy, from the call
to the last token. A prompt is a run of this package's sources; a text that would end earlier continues. Every drafter
takes turns with plain decoding; a figure is the median of the repeats, and tokens are compared: ``same_tokens``.
Nothing else should run on the machine. Making graphs is not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, publish

from paceline.decoder.weights.hub import checkpoint_path
from paceline.experiments.bench import run_cells
from paceline.experiments.config import load_config
from paceline.experiments.prompts import Prompt, Prompts
from paceline.experiments.store import Row
from paceline.text.tokenizer import load_tokenizer


def summary(row: Row) -> dict[str, object]:
    seconds, prefill, plain = row["seconds"], row["prefill_seconds"], row["plain_seconds"]
    return {
        "seconds": round(seconds, 4),
        "prefill_ms": round(1e3 * prefill, 2),
        "ms_per_token": round(1e3 * (seconds - prefill) / max(1, row["new_tokens"] - 1), 4),
        "speed_up": round((plain or seconds) / seconds, 3),
        "same_tokens": row["same_tokens_as_plain"] is not False,
    }


def measure(experiment: Path, lengths: Sequence[int], total: int, repeats: int | None) -> dict[str, dict[str, object]]:
    config = load_config(experiment)
    path = checkpoint_path(config.targets[0].path)
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "core").glob("*.py")))
    ids = load_tokenizer(path).encode(text)
    found: dict[str, dict[str, object]] = {}
    for length in lengths:
        changes = {"max_new_tokens": total - length, "repeats": repeats or config.repeats}
        prompts = Prompts("sources", (Prompt("0", "sources", tuple(ids[:length])),), ())
        for name, (row,) in run_cells(config.model_copy(update=changes), prompts).items():
            assert row["new_tokens"] == total - length, "a text of that length was requested"
            found.setdefault(name, {})[str(length)] = summary(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, nargs="?", default=ROOT / "benchmarks/experiments/latency.yaml")
    parser.add_argument("--tiny", action="store_true", help="64 tokens from 16 and 32, one repeat")
    options = parser.parse_args()
    lengths, total, repeats = ([16, 32], 64, 1) if options.tiny else ([256, 512, 768], 1024, None)
    publish({"total_tokens": total, "modes": measure(options.experiment, lengths, total, repeats)})


if __name__ == "__main__":
    main()
