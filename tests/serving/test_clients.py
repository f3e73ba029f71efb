"""Published clients and a load generator run on the server unmodified.

They want packages of their own. `make test-clients` makes their environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.workers.shared_engine import SharedEngine
from tests.serving.client_programs import PROGRAMS
from tests.serving.edge import running
from tests.serving.test_edge_engine import TOKENIZER, application, generator

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def python() -> str:
    """Python of the clients' environment."""
    found = shutil.which("guidellm")
    if found is None:
        pytest.skip("there is no guidellm on the PATH; `make test-clients` installs it and the clients")
    return str(Path(found).with_name("python"))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server of a table model."""
    with running(application()) as where:
        yield f"{where}/v1"


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Standard output of a client, which may fetch nothing."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": "none", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_from_the_index_runs(python: str, address: str, tmp_path: Path, name: str) -> None:
    program = str(Path(__file__).with_name("client_programs.py"))
    found = json.loads(run([python, program, name, address], tmp_path).splitlines()[-1])
    assert found["whole"] == found["streamed"] or name == "llama_index", "seeds are LlamaIndex's to leave out"
    assert all(found.values())


def test_llm_runs_on_the_command_line(python: str, address: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(f"- {{model_id: ours, model_name: m, api_base: '{address}'}}\n")
    options = ["-m", "ours", "-o", "max_tokens", "8", "-o", "temperature", "0", "abc"]
    said = [
        run([python, "-m", "llm", "prompt", *more, *options], tmp_path, LLM_USER_PATH=str(tmp_path))
        for more in ([], ["--no-stream"])
    ]
    assert said[0] == said[1] and len(said[0].strip()) > 1


# ---- load generators


def test_guidellm_counts_the_tokens_that_were_sent(python: str, tmp_path: Path) -> None:
    """Not those that it asked for, nor the messages, which hold several tokens each."""
    engine = SharedEngine(generator())
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "q", "fox"))
    )
    with running(application(engine)) as where:
        spec = {
            "backend": {"kind": "openai_http", "target": where, "model": "m", "request_format": "/v1/completions"},
            "profile": {"kind": "synchronous"},
            "constraints": [{"kind": "max_requests", "count": 3}],
            "tokenizer": {"kind": "huggingface_auto", "model": "tokenizer"},
            "data": [{"kind": "json_file", "path": "prompts.jsonl"}],
            "outputs": [{"kind": "json", "path": "out.json"}],
        }
        (tmp_path / "run.json").write_text(json.dumps({"spec": spec}))
        run([python, "-m", "guidellm", "run", "--config", "run.json", "--disable-console"], tmp_path)
    report = json.loads((tmp_path / "out.json").read_text())
    (benchmark,) = report["benchmarks"]
    done = benchmark["requests"]["successful"]
    assert len(done) == 3
    assert sum(one["output_tokens"] for one in done) == engine.figures().engine.new_tokens > 3
