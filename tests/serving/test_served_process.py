"""The real `paceline serve` in a separate process: every drafter of a models file by HTTP, and its end on a signal:
running responses are complete, its exit status is 0, it prints no error, and no process of it is left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import yaml

from benchmarks.service_processes import descendants
from tests.decoder.tiny import save_pair
from tests.serving.served import said, with_tokenizer
from tests.waiting import until
from tests.workers.folders import save_heads

pytestmark = pytest.mark.ray

PROMPT = "def f(a, b): def f("
SHAPE = {"path": "target", "n_positions": 128, "amp": "f32", "backend": "eager", "batch_size": 2, "tp_degree": 1}
DRAFTS: dict[str, object] = {
    "plain": None,
    "medusa": {"path": "medusa"},
    "chain": {"path": "eagle", "k": 4},
    "one-pass": {"path": "p-eagle", "k": 3},
    "tree": {"path": "eagle", "draft_tree": "dynamic:4,2,2"},
    "list": ["ngram", {"path": "draft", "k": 2}],
    "choice": {"type": "choice", "drafts": ["ngram", {"path": "draft", "k": 2}]},
    "pard": {"path": "pard", "k": 3},
    "block": {"path": "dflash"},
    "auto": {"path": "draft"},
}
"""Name of a model -> who drafts; `k: auto` is what a draft model has that says nothing."""
METHODS = {
    "plain": [], "medusa": ["medusa"], "chain": ["eagle"], "tree": ["eagle"], "one-pass": ["eagle"],
    "list": ["ngram", "model"], "choice": ["choice"], "pard": ["pard"], "block": ["dflash"], "auto": ["model"],
}  # fmt: skip
"""What the list of models says of them: kinds of drafters, and no path of this machine."""
_START_S, _END_S = 240, 120


class Served:
    """The process, and a client of it. ``errors``: the file that its standard error goes to."""

    def __init__(self, process: subprocess.Popen[bytes], client: openai.OpenAI, errors: Path) -> None:
        self.process, self.client, self.errors = process, client, errors

    def end(self, number: signal.Signals) -> set[int]:
        """Tell it to end. -> its processes"""
        own = {self.process.pid, *descendants(self.process.pid)}
        assert len(own) > 3, "Ray's, at least"
        self.process.send_signal(number)
        return own

    def check_ended(self, own: set[int]) -> None:
        assert self.process.wait(_END_S) == 0
        until(lambda: not any(map(title, own)), 30, what=lambda: list(map(title, own)), pause_s=0.1)
        text = self.errors.read_text()
        assert not [word for word in ("Traceback", "Error", "ray::", "raylet", "Exception") if word in text], text


def title(pid: int) -> str:
    """Name of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@contextmanager
def serving(home: Path, drafts: dict[str, object]) -> Iterator[Served]:
    """`paceline serve` over the target with each of these drafters, ready."""
    entries = [{"name": name, **SHAPE, **({"draft": draft} if draft else {})} for name, draft in drafts.items()]
    (home / "models.yaml").write_text(yaml.safe_dump({"models": entries}))
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port = link.getsockname()[1]
    line = [sys.executable, "-c", "from paceline.cli.main import app; app()", "serve", "models.yaml"]
    errors = home / "stderr"
    with errors.open("wb") as file, openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:  # fmt: skip
        process = subprocess.Popen(
            [*line, "--instance", "inf2.48xlarge", "--port", str(port)],
            cwd=home, stdout=subprocess.PIPE, stderr=file, env={**os.environ, "PACELINE_LOCKS": str(home)},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            end = time.monotonic() + _START_S
            while b"serving at" not in process.stdout.readline():
                assert process.poll() is None and time.monotonic() < end, errors.read_text()
            yield Served(process, client, errors)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(_END_S)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    save_pair(tmp_path)
    save_heads(tmp_path / "target", tmp_path)
    for name in ("target", "draft"):
        with_tokenizer(tmp_path / name, template=None)
    return tmp_path


@pytest.mark.full
def test_every_drafter_is_served_with_the_tokens_of_plain_decoding_and_sigterm_drains(home: Path) -> None:
    sampled = {"do_sample": True, "temperature": 0.8, "seed": 5}
    greedy, drawn = said(home, PROMPT, max_new_tokens=60), said(home, PROMPT, max_new_tokens=60, **sampled)
    with serving(home, DRAFTS) as served:
        listed = {model.id: model.model_extra["paceline"]["methods"] for model in served.client.models.list()}  # type: ignore[index]
        assert listed == METHODS
        for name, draft in DRAFTS.items():
            asked = {"model": name, "prompt": PROMPT, "max_tokens": 60}
            first = served.client.completions.create(temperature=0, **asked)  # type: ignore[call-overload]
            second = served.client.completions.create(temperature=0.8, seed=5, **asked)  # type: ignore[call-overload]
            assert [first.choices[0].text, second.choices[0].text] == [greedy, drawn], name
            drafted = (
                (first.model_extra.get("metrics") or {}).get("speculative_decoding", {}).get("num_draft_tokens", 0)
            )
            assert bool(drafted) == (draft is not None), (name, first)
        whole = said(home, "x", max_new_tokens=126)
        asked = {"model": "plain", "prompt": "x", "max_tokens": 126, "temperature": 0, "n": 100}  # for seconds
        stream = iter(served.client.completions.create(stream=True, **asked))  # type: ignore[call-overload]
        texts: defaultdict[int, str] = defaultdict(str)
        first_part = next(stream).choices[0]
        texts[first_part.index] = first_part.text
        own = served.end(signal.SIGTERM)
        for part in stream:
            texts[part.choices[0].index] += part.choices[0].text
        assert dict(texts) == dict.fromkeys(range(100), whole), "the answer is complete"
        served.check_ended(own)


def test_ctrl_c_ends_the_service_silently(home: Path) -> None:
    with serving(home, {"plain": None}) as served:
        served.check_ended(served.end(signal.SIGINT))
