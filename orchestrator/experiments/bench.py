"""Comparison of drafters with plain decoding and other engines, one row of figures each: `paceline bench` and
benchmarks/.

It runs the cells of an experiment over one set of prompts; each cell alternates with plain decoding
(`paceline.experiments.measure`). Other engines decode every prompt once, afterwards. There is no pass or fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.draft_checks import row_name
from paceline.draft_spec import parse_draft
from paceline.experiments.config import Cell, ExperimentConfig, cells
from paceline.experiments.measure import Bench
from paceline.experiments.prompts import Prompt, Prompts
from paceline.experiments.report import acceptance_of
from paceline.experiments.store import Row
from paceline.heads.frozen_model import transformers_model
from paceline.text.tokenizer import load_tokenizer, prompt_ids

PLAIN = "plain"
"""Name of plain decoding."""

Engine = Callable[[list[int]], list[int]]
"""Prompt -> new tokens, greedily."""


def run_cells(config: ExperimentConfig, prompts: Prompts) -> dict[str, list[Row]]:
    """Rows of every cell by the drafter's name, with the acceptance rule if it is not "match"."""
    with Bench(config) as bench:
        return {_name(cell): bench.measure(cell, prompts)[0] for cell in cells(config)}


def _name(cell: Cell) -> str:
    return cell.drafter.label + ("" if cell.acceptor == "match" else f" {cell.acceptor}")


def run_engine(engine: Engine, prompts: Prompts, plain: Sequence[Row]) -> list[Row]:
    engine(list(prompts.rows[0].ids))
    rows: list[Row] = []
    for prompt, other in zip(prompts.rows, plain, strict=True):
        begin = perf_counter()
        tokens = engine(list(prompt.ids))
        row = {"category": prompt.category, "new_tokens": len(tokens), "seconds": perf_counter() - begin}
        row |= {"group": len(rows), "plain_seconds": other["seconds"], "tokens": tokens}
        rows.append({**row, "same_tokens_as_plain": tokens == other["tokens"]})
    return rows


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of some rows for JSON. A round is drafting and verification, without the loop around them."""
    groups = list({row["group"]: row for row in rows}.values())
    tokens, seconds = sum(row["new_tokens"] for row in rows), _sum(groups, "seconds")
    found: dict[str, Any] = {"tokens_per_second": round(tokens / seconds, 2)}
    plain = _sum(groups, "plain_seconds") or seconds
    unlike = sum(row["same_tokens_as_plain"] is False for row in rows)
    if "num_rounds" not in rows[0]:  # another engine
        return {**found, "over_plain": round(plain / seconds, 3), "texts_unlike_plain": unlike}
    decode = seconds - _sum(groups, "prefill_seconds")
    plain_decode = plain - _sum(groups, "plain_prefill_seconds") if groups[0]["plain_seconds"] else decode
    acceptance = acceptance_of(rows)
    found["decode_tokens_per_second"] = round(tokens / decode, 2)
    if acceptance.num_rounds:
        found["tau"] = round(acceptance.mean_acceptance_length, 3)
        found["acceptance_by_position"] = [round(place.of_drafted, 3) for place in acceptance.positions]
        found["ms_per_round"] = round(1e3 * _sum(groups, "round_seconds") / _sum(groups, "group_rounds"), 3)
    return found | {
        "over_plain": round(plain / seconds, 3),
        "decode_over_plain": round(plain_decode / decode, 3),
        "texts_unlike_plain": unlike,
    }


def _sum(rows: Sequence[Row], name: str) -> float:
    return float(sum(row[name] or 0.0 for row in rows))


def bench_pair(
    target: Path,
    draft: str,
    prompts: Sequence[str],
    *,
    k: Sequence[int] = (2, 4, 6),
    max_new_tokens: int = 128,
    repeats: int = 3,
    load: Mapping[str, Any] | None = None,
    batch_size: int = 1,
) -> dict[str, object]:
    """Measure plain, n-gram, speculative (every k) and Hugging Face decoding, greedily.

    draft  a folder, in the grammar of `paceline.draft_spec`; Hugging Face has draft models alone as assistants
    load   keys of `LoadOptions`, for both models

    Returns a JSON-ready dictionary: ``modes`` by name, ``best_k``, ratios, and whether all Paceline modes gave the same
    tokens (``identical``).
    """
    tokenizer = load_tokenizer(target)
    rows = [
        Prompt(str(n), "", tuple(prompt_ids(tokenizer, text, f"prompt {n}"))) for n, text in enumerate(prompts, start=1)
    ]
    asked = Prompts("prompts", tuple(rows), ())
    pairs = [{"name": f"speculative k={n}", "draft": draft, "k": n} for n in k]
    drafters = [{"name": PLAIN, "draft": "none"}, {"name": "ngram", "draft": "ngram", "k": max(k)}, *pairs]
    config = ExperimentConfig.model_validate(
        {
            "targets": str(target),
            "drafters": drafters,
            "prompt_sets": "prompts",
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "batch_sizes": batch_size,
            "load": dict(load or {}),
        }
    )
    found = run_cells(config, asked)
    ours = list(found)
    (spec,) = parse_draft(draft)
    assistant = spec.path if row_name(spec) == "model" else None
    for name, engine in hugging_face(str(target), assistant, max_new_tokens):
        found[name] = run_engine(engine, asked, found[PLAIN])
    modes = {name: figures(seen) for name, seen in found.items()}
    speeds = {name: one["tokens_per_second"] for name, one in modes.items()}
    best = max(k, key=lambda n: speeds[f"speculative k={n}"])
    assisted, generate = (
        max((speed for name, speed in speeds.items() if name.startswith(f"transformers {kind}")), default=None)
        for kind in ("assisted", "generate")
    )
    assert generate is not None, "it always runs"
    return {
        "modes": modes,
        "best_k": best,
        "speculative_over_plain": modes[f"speculative k={best}"]["over_plain"],
        "speculative_over_transformers_assisted": assisted and round(speeds[f"speculative k={best}"] / assisted, 3),
        "plain_over_transformers_generate": round(speeds[PLAIN] / generate, 3),
        "identical": not any(modes[name]["texts_unlike_plain"] for name in ours),
        "prompts": len(rows),
    }


def hugging_face(target: str, draft: str | None, max_new_tokens: int) -> Iterator[tuple[str, Engine]]:
    """Time `generate` without and with an assistant, in both number formats: which is faster depends on the machine."""
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        big, *small = (transformers_model(path, dtype) for path in (target, draft) if path is not None)
        for model in (big, *small):
            if not model.generation_config.eos_token_id:  # an empty list of ids, which `generate` cannot take
                model.generation_config.eos_token_id = None
        yield f"transformers generate {name}", transformers_engine(big, None, max_new_tokens)
        for model in small:
            yield f"transformers assisted {name}", transformers_engine(big, model, max_new_tokens)


def transformers_engine(model: PreTrainedModel, assistant: PreTrainedModel | None, max_new_tokens: int) -> Engine:
    def run(row: list[int]) -> list[int]:
        ids = torch.tensor([row])
        with torch.no_grad():
            out: list[int] = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=assistant,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )[0, len(row) :].tolist()
        return out

    return run
