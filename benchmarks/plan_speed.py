"""Calibration of the speed planner: what it predicts for a grid of cells, and what these take when they are run.

Rounds are timed at the shallowest and the deepest draft of each drafter, at the smallest and the largest batch. From
these and a trace the planner predicts all other depths and batch sizes, which are run as well. Plain decoding is timed
in turns with every cell, so that the predicted speed-up has an error that a busy machine does not bend.

Runs in parts: no cell begins after --minutes, and the same command goes on; the last part prints the figures. Cells of
another commit or version are refused.

    python benchmarks/plan_speed.py --out build/plan-speed --minutes 4
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from time import monotonic
from typing import Any

from common import PAIR, facts

from paceline.experiments import record_traces, round_times, runner
from paceline.experiments.config import ExperimentConfig
from paceline.experiments.questions import Policy, PolicyResult, ask
from paceline.experiments.store import CellResult, Store
from paceline.experiments.trace import load_trace

DEPTHS = (1, 2, 3, 4, 5)
BATCH_SIZES = (1, 2, 4)
ALLOWED = 0.1
"""Relative error above which a cell is a miss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder; finished cells of this commit are kept")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many minutes")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--amp", default="bf16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    config = experiment(asked.backend, asked.amp, tokens=asked.tokens, repeats=asked.repeats)
    deadline = monotonic() + 60 * asked.minutes
    store = Store(asked.out)
    planned = runner.plan(config, store)
    if others := planned.of_other_programs():  # the report names one commit
        raise SystemExit(f"{others}; remove {asked.out}, or name another folder")
    results = runner.run(planned, store, lambda label, *_: print(label, flush=True), deadline=deadline)
    if failed := runner.failed(results):
        raise SystemExit(f"failed: {failed[0].error}")
    traces = record_traces.record_traces(planned, store, lambda label, *_: print(label), deadline=deadline)
    if len(results) < len(planned.cells) or not traces:
        print(json.dumps({**facts(), "finished": len(results), "of": len(planned.cells)}))
        return
    figures = calibration(config, results, traces[0])
    print(json.dumps({**facts(), "backend": asked.backend, "amp": asked.amp, **figures}))


def experiment(backend: str, amp: str, *, tokens: int, repeats: int) -> ExperimentConfig:
    """The grid, over the small pair."""
    values: dict[str, Any] = {
        "name": "plan speed",
        "targets": str(PAIR / "target"),
        "drafters": [
            "none",
            {"name": "draft model", "draft": str(PAIR / "draft"), "k": list(DEPTHS)},
            {"name": "EAGLE-3", "draft": str(PAIR / "eagle3"), "k": list(DEPTHS)},
        ],
        "prompt_sets": {"path": str(PAIR / "prompts.jsonl"), "name": "code", "count": 4},
        "batch_sizes": BATCH_SIZES,
    }
    return ExperimentConfig(
        **values, max_new_tokens=tokens, repeats=repeats, traces=True, backend=backend, amp=amp, ignore_eos=True
    )


def is_timed(result: CellResult) -> bool:
    """Whether the planner sees this cell's times."""
    ends = BATCH_SIZES[0], BATCH_SIZES[-1]
    return result.names["batch_size"] in ends and result.names["k"] in (None, DEPTHS[0], DEPTHS[-1])


def calibration(config: ExperimentConfig, results: list[CellResult], file: Path) -> dict[str, object]:
    """Predictions for the cells that were not timed, and their errors."""
    trace = load_trace(file)
    times = round_times.measured(config, [one for one in results if is_timed(one)]).of(trace)

    def predicted(policy: Policy, size: int) -> PolicyResult:
        return ask(trace, policy, batch_size=size, times=times, grouped=True)

    plain = {size: predicted(Policy(()), size).tokens_per_second or 0.0 for size in BATCH_SIZES}
    cells = []
    for one in results:
        name, k, size = str(one.names["drafter"]), one.names["k"], int(str(one.names["batch_size"]))
        if is_timed(one) or not isinstance(k, int):
            continue
        answer = predicted(Policy((name,), k), size)
        speed = answer.tokens_per_second or 0.0
        measured, speedup = one.totals["tokens_per_second"], one.totals["speedup"]
        cells.append(
            {
                "drafter": name,
                "k": k,
                "batch_size": size,
                "rounds_predicted": answer.acceptance.num_rounds,
                "rounds_measured": sum(row["num_rounds"] for row in one.rows),
                "tokens_per_second_predicted": speed,
                "tokens_per_second_measured": measured,
                "speed_error": speed / measured - 1,
                "speedup_predicted": speed / plain[size],
                "speedup_measured": speedup,
                "speedup_error": speed / plain[size] / speedup - 1,
            }
        )
    figures: dict[str, object] = {"timed_cells": sum(map(is_timed, results)), "predicted_cells": len(cells)}
    for name in ("speed_error", "speedup_error"):
        errors = sorted(abs(float(cell[name])) for cell in cells)
        missed = [f"{cell['drafter']} k={cell['k']} batch {cell['batch_size']}: {cell[name]:+.1%}" for cell in cells
                  if abs(float(cell[name])) > ALLOWED]  # fmt: skip
        figures |= {f"median_{name}": errors[len(errors) // 2], f"largest_{name}": errors[-1], f"{name}_misses": missed}
    return {**figures, "cells": cells}


if __name__ == "__main__":
    main()
