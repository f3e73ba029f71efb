"""Conversion of results to and from the formats of other tools: Spec-Bench, AIPerf and vLLM.

    spec-bench  the answer file of Spec-Bench (hemingkx/Spec-Bench, evaluation/): choices[0] with turns, new_tokens,
                wall_time, accept_lengths and decoding_steps, which its speed.py and equal.py read
    aiperf      the SpecDecodeAcceptanceRecord of AIPerf (ai-dynamo/aiperf, spec_decode_models.py), one per request
    vllm        vLLM's counters of speculative decoding, with the names of its /metrics

Paceline's own files are in `store.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from paceline.core.detokenizer import Decodes
from paceline.core.errors import ConfigurationError, PromptError
from paceline.decoder.weights.atomic_write import save_bytes
from paceline.experiments.definitions import Acceptance, Draft
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


def read_records(path: Path) -> list[tuple[str, Acceptance]]:
    """Name and acceptance of each request in JSON lines with per-step arrays: vLLM's responses
    (``metrics.speculative_decoding``) or AIPerf's records (``spec_decode_acceptance``).

    Raises:
        PromptError: the file cannot be read.
        ConfigurationError: a record has no such arrays, or they contradict its counts.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PromptError(f"{path}: expected JSON lines, got {error}; correct the file") from error
    return [_record(row, number, path) for number, row in enumerate(rows, start=1)]


def _record(row: Any, number: int, path: Path) -> tuple[str, Acceptance]:
    figures = _below(row, "spec_decode_acceptance") or _below(row, "speculative_decoding") or row
    where = f"{path}, record {number}"
    steps = [figures.get(f"per_step_{name}") if isinstance(figures, Mapping) else None for name in _STEPS]
    accepted, drafted = (step if _counts(step) else [] for step in steps)
    if not all(map(_counts, steps)) or len(accepted) != len(drafted):
        raise ConfigurationError(
            f"{where}: expected the arrays per_step_accepted and per_step_drafted of equal length, got none; let "
            "the server report them (vLLM: --per-request-spec-decode-metrics detailed)"
        )
    if any(a > d for a, d in zip(accepted, drafted, strict=True)):
        raise ConfigurationError(
            f"{where}: expected at most as many accepted as drafted tokens in each step, got more; export the file "
            "again"
        )
    for name, value in (("num_accepted_draft_tokens", sum(accepted)), ("num_draft_tokens", sum(drafted))):
        if figures.get(name, value) != value:
            raise ConfigurationError(
                f"{where}: {name}: expected {value}, the sum over its steps, got {figures[name]}; export the file again"
            )
    drafts = tuple(Draft(d, a) for d, a in zip(drafted, accepted, strict=True) if d)
    tokens = figures.get("completion_tokens") or _below(row, "completion_tokens") or 1 + len(drafted) + sum(accepted)
    named = row if isinstance(row, Mapping) else {}
    name = str(named.get("request_id", named.get("id", number)))
    return name, Acceptance(drafts, len(drafted), int(tokens))


_STEPS = ("accepted", "drafted")


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(one, int) and one >= 0 for one in value)


def _below(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for part in value if (found := _below(part, key)) is not None), None)
    return None


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
