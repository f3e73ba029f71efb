"""What the benchmarks share: the demo family, its prompts, and the facts that every report names."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples" / "pycode"


def prompts(count: int) -> list[str]:
    """The demo prompts, spread over the file."""
    rows = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()]
    return rows[:: max(1, len(rows) // count)][:count]


def prompt_ids(count: int) -> list[list[int]]:
    """The same, as the target reads them."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    return [tokenizer(prompt).input_ids for prompt in prompts(count)]


def facts() -> dict[str, object]:
    """Date, commit and machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": [platform.machine(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()],
        "torch": torch.__version__,
    }


def publish(report: dict[str, object]) -> None:
    """Show a report to a reader, and on the last line to a program."""
    print(json.dumps(report, indent=1))
    print(json.dumps({**facts(), **report}))
