"""Conversion of results to the formats of other tools: Spec-Bench, AIPerf and vLLM.

    spec-bench  the answer file of Spec-Bench (hemingkx/Spec-Bench, evaluation/): choices[0] with turns, new_tokens,
                wall_time, accept_lengths and decoding_steps, which its speed.py and equal.py read
    aiperf      the SpecDecodeAcceptanceRecord of AIPerf (ai-dynamo/aiperf, spec_decode_models.py), one per request
    vllm        vLLM's counters of speculative decoding, with the names of its /metrics

Paceline's own files are in `store.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.experiments.report import acceptance_of
from paceline.experiments.store import CellResult, read_config, read_results
from paceline.text.tokenizer import load_tokenizer


def spec_bench(result: CellResult, tokenizer: Decodes) -> Iterator[dict[str, Any]]:
    """One answer for every prompt. ``accept_lengths`` include the target's token; rounds without a draft are 1."""
    for row in result.rows:
        lengths = [accepted + 1 for accepted in row["per_step_accepted"]]
        lengths += [1] * (row["num_rounds"] - row["num_drafts"])
        text = tokenizer.decode(row["tokens"], skip_special_tokens=True)
        yield {
            "question_id": row["prompt"],
            "category": row["category"],
            "answer_id": f"{result.key}-{row['prompt']}",
            "model_id": f"{result.names['target']}-{result.names['drafter']}-{result.names['k']}",
            "choices": [
                {
                    "index": 0,
                    "turns": [text],
                    "decoding_steps": [row["num_rounds"]],
                    "new_tokens": [row["new_tokens"]],
                    "wall_time": [row["seconds"]],
                    "accept_lengths": lengths,
                }
            ],
        }


def aiperf(result: CellResult) -> Iterator[dict[str, Any]]:
    for row in result.rows:
        figures = acceptance_of([row])
        histogram = {str(length): count for length, count in enumerate(figures.histogram) if count}
        yield {
            "request_id": f"{result.key}-{row['prompt']}",
            "spec_decode_acceptance": {
                "engine": "paceline",
                "mean_acceptance_length": figures.mean_acceptance_length,
                "draft_acceptance_rate": figures.draft_acceptance_rate,
                "acceptance_histogram": histogram,
                "num_accepted_draft_tokens": figures.num_accepted_tokens,
                "num_draft_tokens": figures.num_draft_tokens,
                "num_spec_steps": figures.num_drafts,
                "num_spec_tokens": result.names["k"] if isinstance(result.names["k"], int) else None,
                "completion_tokens": figures.new_tokens,
                "per_step_accepted": row["per_step_accepted"],
                "per_step_drafted": row["per_step_drafted"],
            },
        }


def vllm_metrics(result: CellResult) -> str:
    """Counters of a cell in the text format of Prometheus."""
    figures = acceptance_of(result.rows)
    labels = f'model_name="{result.names["target"]}",drafter="{result.names["drafter"]}",cell="{result.key}"'
    lines = []
    for name, value in (
        ("num_drafts", figures.num_drafts),
        ("num_draft_tokens", figures.num_draft_tokens),
        ("num_accepted_tokens", figures.num_accepted_tokens),
    ):
        lines += [f"# TYPE vllm:spec_decode_{name} counter", f"vllm:spec_decode_{name}_total{{{labels}}} {value}"]
    lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter")
    for index, place in enumerate(figures.positions):
        lines.append(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{index}"}} {place.accepted}'
        )
    return "\n".join(lines) + "\n"


def write_exports(folder: Path, experiment: Path, layout: str) -> list[Path]:
    """Write one file for every successful cell of a folder, or raise ConfigurationError or StorageError."""
    if layout not in LAYOUTS:
        raise ConfigurationError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}; use one of them")
    written = []
    results = [one for one in read_results(experiment) if one.error is None]
    tokenizers = _tokenizers(experiment) if layout == "spec-bench" else {}
    for result in results:
        if layout == "vllm":
            text, suffix = vllm_metrics(result), "prom"
        else:
            rows = aiperf(result) if layout == "aiperf" else spec_bench(result, tokenizers[str(result.names["target"])])
            text, suffix = "".join(json.dumps(row) + "\n" for row in rows), "jsonl"
        path = folder / f"{result.key}.{layout}.{suffix}"
        save_bytes(path, [text.encode()])
        written.append(path)
    return written


def _tokenizers(experiment: Path) -> dict[str, Decodes]:
    config = read_config(experiment)
    return {target.label: load_tokenizer(Path(target.path)) for target in config.targets}


LAYOUTS = ("spec-bench", "aiperf", "vllm")
