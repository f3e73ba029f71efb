"""Structured output of the demo pair: how many outputs are valid, and how many are those of plain decoding.

    python -m benchmarks.structured --outputs 10000 [--drafts suffix DIR DIR:draft_tree=dynamic:8,4,3] [--state FILE]

Several schemas and an expression, at temperature 0 and 1, each with plain decoding and with the given drafts. An output
that reaches its longest length counts as cut, neither as valid nor as invalid. With ``--state`` a run that was ended
continues where it was; another backend may continue, and is counted apart. Prints counts as JSON on the last line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter

import jsonschema
from transformers import AutoTokenizer

from paceline import AutoDecoder, SpeculativeGenerator, StructuredOutput

DEMO = Path(__file__).resolve().parents[1] / "examples" / "pycode"
BLOCK = 16  # rows that are decoded by one call, and done together
EXPRESSION = r"[a-z]{1,8}_[0-9]{1,3}"
SCHEMAS: dict[str, dict[str, object]] = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "call": {
        "type": "object",
        "properties": {
            "function": {"enum": ["open", "close", "seek"]},
            "arguments": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["function", "arguments"],
        "additionalProperties": False,
    },
    "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 6},
}


def valid(kind: str, text: str) -> bool:
    """Judged by other code than what made it."""
    if kind == "expression":
        return re.fullmatch(EXPRESSION, text) is not None
    try:
        jsonschema.validate(json.loads(text), SCHEMAS[kind])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Block:
    """A line of the file of what is done: some rows of one kind at one temperature, decoded in every way."""

    kind: str
    temperature: float
    first: int  # row, which is the seed too
    counts: dict[str, int]
    mean_acceptance_length: dict[str, float]
    seconds: float
    backend: str


class Runs:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
        lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        self._prompts = [self._tokenizer(json.loads(line)["prompt"]).input_ids[:48] for line in lines]
        target = AutoDecoder.from_pretrained(
            DEMO / "target", n_positions=256, batch_size=options.batch_size, backend=options.backend, amp=options.amp
        )
        # Four tokens a round, or what a tree or heads say.
        drafts = {Path(draft).name: SpeculativeGenerator(draft, target) for draft in options.drafts}
        self._generators = {"plain": SpeculativeGenerator(None, target), **drafts}

    def block(self, kind: str, structured: StructuredOutput, temperature: float, *, first: int) -> Block:
        begin, counts, means = perf_counter(), Counter[str](), dict[str, float]()
        places = range(first, first + BLOCK)
        rows = [self._prompts[place % len(self._prompts)] for place in places]
        setting = {"do_sample": temperature > 0, "temperature": temperature or 1.0, "seed": list(places)}
        known: list[list[int]] = []
        for name, generator in self._generators.items():
            done = generator.sample(
                rows,
                return_dict=True,
                structured_outputs=structured,
                tokenizer=self._tokenizer,
                max_new_tokens=self.options.max_new_tokens,
                **setting,  # type: ignore[arg-type]
            )
            texts = [row[:length] for row, length in zip(done.sequences.tolist(), done.lengths, strict=True)]
            known = known or texts
            counts["outputs"] += len(texts)
            counts["equal to plain"] += sum(a == b for a, b in zip(texts, known, strict=True))
            for row, text, reason in zip(rows, texts, done.finish_reasons, strict=True):
                if reason != "stop":
                    counts["cut"] += 1
                    continue
                good = valid(kind, self._tokenizer.decode(text[len(row) :], skip_special_tokens=True))
                counts["valid" if good else "invalid"] += 1
            if name != "plain":
                means[name] = done.statistics.mean_acceptance_length
        return Block(kind, temperature, first, dict(counts), means, perf_counter() - begin, self.options.backend)


def read_blocks(file: Path | None) -> list[Block]:
    if file is None or not file.exists():
        return []
    return [Block(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def summary(blocks: Sequence[Block]) -> dict[str, object]:
    counts, backends = Counter[str](), Counter[str]()
    for block in blocks:
        counts.update(block.counts)
        backends[block.backend] += block.counts["outputs"]
    names = {name for block in blocks for name in block.mean_acceptance_length}
    means = {name: mean(block.mean_acceptance_length[name] for block in blocks) for name in sorted(names)}
    seconds = sum(block.seconds for block in blocks)
    return {**counts, "mean_acceptance_length": means, "seconds": round(seconds, 1), "outputs_of_backends": backends}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--outputs", type=int, default=10_000, help="of all kinds, temperatures and drafts together")
    parser.add_argument("--drafts", nargs="+", default=["suffix", str(DEMO / "draft")])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=BLOCK)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--state", type=Path, help="file of results, which a later run continues")
    options = parser.parse_args()
    asked = {name: StructuredOutput("json_schema", schema) for name, schema in SCHEMAS.items()}
    asked["expression"] = StructuredOutput("regex", EXPRESSION)
    cells = list(itertools.product(asked, (0.0, 1.0)))
    share = math.ceil(options.outputs / (len(cells) * BLOCK * (1 + len(options.drafts))))  # blocks of a cell
    blocks = read_blocks(options.state)
    known = {(block.kind, block.temperature, block.first) for block in blocks}
    runs = None
    for number, (kind, temperature) in itertools.product(range(share), cells):  # every kind early
        first = number * BLOCK
        if (kind, temperature, first) in known:
            continue
        runs = runs or Runs(options)
        blocks.append(runs.block(kind, asked[kind], temperature, first=first))
        if options.state is not None:
            with options.state.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(blocks[-1])) + "\n")
        print(f"{kind} at {temperature}, row {first}: {summary(blocks)}", flush=True)
    print(json.dumps(summary(blocks)))


if __name__ == "__main__":
    main()
