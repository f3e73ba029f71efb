"""Published clients and a load generator run on the server unmodified.

They want packages of their own: `make test-clients` and `make test-aiperf`, which CI runs, make their environments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.serving.api import create_app
from paceline.serving.model_server import LocalRouter, ModelServer
from paceline.serving.settings import ApiSettings
from paceline.text.tokenizer import load_tokenizer
from paceline.workers.shared_engine import SharedEngine
from tests.house.test_structure import REPOSITORY
from tests.serving.client_programs import PROGRAMS
from tests.serving.edge import card, running
from tests.serving.test_edge_engine import TOKENIZER, application, generator


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


@pytest.mark.clients
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_published_client_runs(python: str, address: str, tmp_path: Path, name: str) -> None:
    program = str(Path(__file__).with_name("client_programs.py"))
    found = json.loads(run([python, program, name, address], tmp_path).splitlines()[-1])
    assert found["whole"] == found["streamed"] or name == "llama_index", "seeds are LlamaIndex's to leave out"
    assert all(found.values())


@pytest.mark.clients
def test_llm_runs_on_the_command_line(python: str, address: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(f"- {{model_id: ours, model_name: m, api_base: '{address}'}}\n")
    options = ["-m", "ours", "-o", "max_tokens", "8", "-o", "temperature", "0", "abc"]
    said = [
        run([python, "-m", "llm", "prompt", *more, *options], tmp_path, LLM_USER_PATH=str(tmp_path))
        for more in ([], ["--no-stream"])
    ]
    assert said[0] == said[1] and len(said[0].strip()) > 1


# ---- lm-eval

CHOICES = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": 0,
    "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
    "metric_list": [{"metric": "bypass"}],
}
TEXTS = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
QUESTIONS: list[dict[str, Any]] = [
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " import", "()"]},
    {"question": "for index in range(", "choices": ["len(items)):", "while", "10"]},
    {"question": "import", "choices": [" os", " sys\nimport os\n", "ant"]},
    {"question": "class Tree:\n    def __init__(self", "choices": [", root):", " self", "):\n        pass"]},
]


def write_tasks(folder: Path) -> None:
    """Tasks over questions of a file."""
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    for name, task in (("choices", CHOICES), ("writing", WRITING), ("texts", TEXTS)):
        whole = {"task": f"our_{name}", "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # YAML, too


@pytest.mark.clients
def test_lm_eval_finds_what_its_own_model_gives(python: str, tmp_path: Path) -> None:
    """In f32: each log-likelihood, whether it is the greedy text, and what is written, by rounds with drafts."""
    write_tasks(tmp_path)
    target = REPOSITORY / "examples/pycode/target"
    decoder = AutoDecoder.from_pretrained(target, amp="f32", batch_size=4)
    made = SpeculativeGenerator("suffix", decoder, k=4)
    served = ModelServer(load_tokenizer(target), SharedEngine(made), made.limits, card=card())
    with running(create_app(LocalRouter({"m": served}), ApiSettings())) as address:
        asked = f"model=m,base_url={address}/v1/completions,tokenizer={target},max_length=1024"
        for model, arguments in (
            ("hf", f"pretrained={target},dtype=float32,max_length=1024"),
            ("local-completions", asked),
        ):
            command = ["-m", "lm_eval", "--model", model, "--model_args", arguments, "--include_path", str(tmp_path)]
            more = ["--tasks", "our_choices,our_writing,our_texts", "--log_samples", "--output_path", model]
            run([python, *command, *more, "--batch_size", "2", "--device", "cpu"], tmp_path)
    theirs, ours = (samples(tmp_path / model) for model in ("hf", "local-completions"))
    assert theirs.keys() == ours.keys() and len(ours) == 3 * len(QUESTIONS)
    for key, expected in theirs.items():
        for right, found in zip(expected, ours[key], strict=True):
            assert found[1:] == right[1:] and found[0] == pytest.approx(right[0], abs=2e-3), key
    assert len({found[0] for answer in ours.values() for found in answer}) > 2 * len(QUESTIONS)


def samples(folder: Path) -> dict[tuple[str, int], list[list[Any]]]:
    """Answers that lm-eval recorded, by task and question: a text, or log-likelihoods and whether each is greedy."""
    found = {}
    for file in folder.rglob("samples_our_*.jsonl"):
        for line in file.read_text().splitlines():
            sample = json.loads(line)
            answers = [one if isinstance(one, list) else [one] for one in sample["filtered_resps"]]
            found[file.name.split("_20")[0], sample["doc_id"]] = [
                [float(answer[0]), *map(str, answer[1:])] if "writing" not in file.name else [0.0, *answer]
                for answer in answers
            ]
    return found


# ---- load generators


@pytest.mark.clients
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


@pytest.mark.aiperf
@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf_totals_equal_the_engines(tmp_path: Path, kind: str) -> None:
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
