"""`aiperf profile` runs on the HTTP edge unmodified, and its acceptance totals are those of the engine.

aiperf pins many packages, so it wants an environment of its own. `make test-aiperf`, which CI runs, makes it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.workers.shared_engine import SharedEngine
from tests.serving.edge import running
from tests.serving.test_edge_engine import TOKENIZER, application, generator


@pytest.mark.aiperf
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_totals_of_aiperf_are_those_of_the_engine(tmp_path: Path, kind: str) -> None:
    aiperf = shutil.which("aiperf")
    if aiperf is None:
        pytest.skip("there is no aiperf on the PATH; `make test-aiperf` installs it")
    engine = SharedEngine(generator())
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abc", "q", "fox")))
    fields = {"max_tokens": 40, "temperature": 0.8, "ignore_eos": True}
    with running(application(engine)) as address:
        command = [
            *(aiperf, "profile", "-m", "m", "--url", address, "--endpoint-type", kind, "--streaming"),
            *("--tokenizer", "tokenizer", "--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn"),
            *("--request-count", "6", "--concurrency", "3", "--extra-inputs", json.dumps(fields)),
            *("--ui", "none", "--artifact-dir", "out"),
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    figures = engine.figures().engine
    assert found["total_spec_decode_steps"]["avg"] == figures.num_drafts > 0
    assert found["total_draft_tokens"]["avg"] == figures.num_draft_tokens > 0
    assert found["total_accepted_draft_tokens"]["avg"] == figures.num_accepted_tokens > 0
