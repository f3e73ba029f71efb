"""Measure how many drafted tokens of each drafter are accepted, greedily, and write `acceptance.json`.

    python examples/smollm2/recipe/measure.py --target smollm2 --out examples/smollm2/acceptance.json

One held-out prompt of every category, in float32, which gives the same tokens on every machine but for near-ties: what
a test repeats. Speeds, and every prompt, are `benchmarks/experiments/chat.yaml`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.decoder.weights.hub import checkpoint_path
from paceline.outputs import GenerationResult
from paceline.text.chat import chat_ids
from paceline.text.tokenizer import load_tokenizer

FOLDER = Path(__file__).resolve().parents[1]
NEW, LONGEST, ROOM = 32, 192, 256

Drafts = dict[str, dict[str, object]]


def drafts() -> Drafts:
    """Drafters by name: keywords of `SpeculativeGenerator`."""
    eagle, medusa, draft = str(FOLDER / "eagle3"), str(FOLDER / "medusa"), load(FOLDER / "draft")
    answers = str(FOLDER / "answers.bin")
    return {
        "ngram": {"draft": "ngram", "k": 4},
        "suffix": {"draft": "suffix", "k": 4},
        "draft": {"draft": draft, "k": 3, "vocabulary": "intersection"},
        "eagle3": {"draft": {"path": eagle, "k": 4}},
        "eagle3, dynamic tree": {"draft": {"path": eagle, "draft_tree": "dynamic:8,4,3"}},
        "medusa": {"draft": {"path": medusa}},
        "suffix, answers": {"draft": {"type": "suffix", "corpus": answers, "min_match": 1}, "k": 4},
        "suffix, answers, draft": {
            "draft": [{"type": "suffix", "corpus": answers, "min_match": 3}, draft],
            "k": 3,
            "vocabulary": "intersection",
        },
        "suffix, draft": {"draft": ["suffix", draft], "k": 3, "vocabulary": "intersection"},
    }


def load(path: Path) -> SamplingDecoder:
    """In float32, for the longest of the prompts."""
    return AutoDecoder.from_pretrained(path, n_positions=ROOM, context_length_estimate=LONGEST, amp="f32")


def prompts(target: Path) -> list[list[int]]:
    """The first of each category that fits, in the chat template."""
    tokenizer = load_tokenizer(target)
    found: dict[str, list[int]] = {}
    for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = chat_ids(tokenizer, [{"role": "user", "content": row["prompt"]}])
        if len(ids) <= LONGEST:
            found.setdefault(row["category"], ids)
    return list(found.values())


def run(generator: SpeculativeGenerator | SamplingDecoder, rows: list[list[int]], **asked: object) -> dict[str, object]:
    """The texts, one prompt at a time, and what was counted over all of them."""
    texts, drafts, accepted = [], 0, [0] * 64
    for row in rows:
        made = generator.sample([row], max_new_tokens=NEW, return_dict=True, **asked)  # type: ignore[arg-type]
        assert isinstance(made, GenerationResult)
        texts.append(made.sequences[0, : int(made.lengths[0])].tolist())
        drafts += made.statistics.num_drafts
        for place, count in enumerate(made.statistics.num_accepted_tokens_per_pos):
            accepted[place] += count
    depth = max((place + 1 for place, count in enumerate(accepted) if count), default=0)
    return {"texts": texts, "num_drafts": drafts, "num_accepted_tokens_per_pos": accepted[:depth]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="drafters to count anew in the file that is there; default: all")
    options = parser.parse_args()
    path = checkpoint_path(options.target)
    target, rows = load(path), prompts(path)
    report: dict[str, object] = {"prompts": len(rows), "new_tokens": NEW}
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.only else {}
    for name, given in drafts().items():
        if options.only and name not in options.only:
            report[name] = before[name]
            continue
        counted = run(SpeculativeGenerator(target=target, **given), rows)  # type: ignore[arg-type]
        del counted["texts"]
        report[name] = counted
        print(name, counted, flush=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
