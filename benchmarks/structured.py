"""Structured output of the demo pair: how many outputs are valid, and how many are those of plain decoding.

    python benchmarks/structured.py --outputs 10000

Several schemas and an expression, at temperature 0 and 1, each with plain decoding and with the given drafts. An output
that reaches its longest length counts as cut, neither as valid nor as invalid. Prints counts as JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from time import perf_counter

import jsonschema
from transformers import AutoTokenizer

from paceline import AutoDecoder, SpeculativeGenerator, StructuredOutput

DEMO = Path(__file__).resolve().parents[1] / "examples" / "pycode"
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


def main() -> None:
    """Run it, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=10_000, help="of all kinds, temperatures and drafts together")
    parser.add_argument("--drafts", nargs="+", default=["suffix", str(DEMO / "draft")])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    lines = (DEMO / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids[:48] for line in lines]
    target = AutoDecoder.from_pretrained(
        DEMO / "target", n_positions=256, batch_size=options.batch_size, backend=options.backend
    )
    plain = SpeculativeGenerator(None, target)
    others = {Path(draft).name: SpeculativeGenerator(draft, target, k=4) for draft in options.drafts}
    asked = {name: StructuredOutput("json_schema", schema) for name, schema in SCHEMAS.items()}
    asked["expression"] = StructuredOutput("regex", EXPRESSION)
    share = max(1, options.outputs // (2 * len(asked) * (1 + len(others))))
    counts: Counter[str] = Counter()
    acceptance: dict[str, list[float]] = {name: [] for name in others}
    begin = perf_counter()
    for kind, structured in asked.items():
        for temperature in (0.0, 1.0):
            rows = [prompts[place % len(prompts)] for place in range(share)]
            law = {"do_sample": temperature > 0, "temperature": temperature or 1.0, "seed": list(range(share))}
            known: list[list[int]] = []
            for name, generator in {"plain": plain, **others}.items():
                done = generator.sample(
                    rows,
                    return_dict=True,
                    structured_outputs=structured,
                    tokenizer=tokenizer,
                    max_new_tokens=options.max_new_tokens,
                    **law,  # type: ignore[arg-type]
                )
                texts = [row[:length] for row, length in zip(done.sequences.tolist(), done.lengths, strict=True)]
                known = known or texts
                counts["outputs"] += len(texts)
                counts["equal to plain"] += sum(a == b for a, b in zip(texts, known, strict=True))
                for row, text, reason in zip(rows, texts, done.finish_reasons, strict=True):
                    if reason != "stop":
                        counts["cut"] += 1
                        continue
                    good = valid(kind, tokenizer.decode(text[len(row) :], skip_special_tokens=True))
                    counts["valid" if good else "invalid"] += 1
                if name in acceptance:
                    acceptance[name].append(done.statistics.mean_acceptance_length)
            print(f"{kind} at {temperature}: {dict(counts)}", flush=True)
    means = {name: sum(values) / len(values) for name, values in acceptance.items()}
    seconds = perf_counter() - begin
    print(json.dumps({**counts, "mean_acceptance_length": means, "seconds": seconds, "backend": options.backend}))


if __name__ == "__main__":
    main()
