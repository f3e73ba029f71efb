"""Commands of docs/start-neuron.md as printed, in a shell: on a machine without a chip, then on the SDK's double."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from textwrap import dedent
from urllib.request import Request, urlopen

import pytest

from tests.cli.conftest import home
from tests.docs.pages import text
from tests.neuron.conftest import DOUBLE, SDK, write_packages

__all__ = ["home"]

PACELINE = f'#!/bin/sh\nexec {sys.executable} -c "from paceline.cli.main import app; app()" "$@"\n'
COMPILER = '#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\necho neff > "$2"\n'
LISTED = json.dumps([{"nc_count": 2, "memory_size": 32 << 30, "neuroncore_ids": [2 * n, 2 * n + 1]} for n in range(12)])


def blocks(part: str) -> list[str]:
    """Indented blocks under a heading of the page."""
    (found,) = re.findall(rf"^## {part}\n(.*?)(?=^## |\Z)", text("docs/start-neuron.md"), re.DOTALL | re.MULTILINE)
    return [dedent(block) for block in re.findall(r"(?:^    .*\n)+", found, re.MULTILINE)]


def commands(part: str) -> list[str]:
    return [line for block in blocks(part) if not block.startswith("#") for line in block.splitlines()]


@pytest.fixture
def place(home: Path, tmp_path: Path) -> Path:
    """A folder with what the page names, and tools that stand for the SDK's. A tiny pair has the models' names."""
    (models,) = [block for block in blocks("Without a chip") if block.startswith("# models.yaml")]
    (tmp_path / "models.yaml").write_text(models)
    for name, role in (("Llama-3.1-8B", "target"), ("Llama-3.2-1B", "draft")):
        copytree(home / role, tmp_path / name)
        config = tmp_path / name / "config.json"
        config.write_text(config.read_text().replace(": 512", ": 128"))  # fewer graphs
    (tmp_path / "bin").mkdir()
    tools = {"paceline": PACELINE, "neuronx-cc": COMPILER, "neuron-ls": f"#!/bin/sh\necho '{LISTED}'\n"}
    for name, script in tools.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    write_packages(tmp_path / "site", SDK)
    (tmp_path / "cores").mkdir()
    return tmp_path


def variables(place: Path, *, chip: bool) -> dict[str, str]:
    found = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "PACELINE_CACHE": str(place / "cache")}
    found |= {"PACELINE_LOCKS": str(place), "COLUMNS": "200"}
    stand_in = {"PYTHONPATH": f"{place / 'site'}:{DOUBLE}", "NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}
    return found | ({**stand_in, "NEURON_DOUBLE_CORES": str(place / "cores")} if chip else {})


def run(line: str, place: Path, *, chip: bool) -> str:
    shell = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(shell, cwd=place, env=variables(place, chip=chip), capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_command_without_a_chip_runs(place: Path) -> None:
    planned, cost, export, compiling = commands("Without a chip")
    assert "chat-draft" in run(planned, place, chip=False) and "expected_ms" in run(cost, place, chip=False)
    assert "round" in run(export, place, chip=False)
    manifest = place / "graphs" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"fx"', '"hlo"'))  # as with torch_xla
    assert "ok   round" in run(compiling, place, chip=False)
    report = json.loads((place / "graphs" / "report.json").read_text())
    assert [one["compiled"] for one in report["graphs"]] == [True, True]


def test_every_command_with_a_chip_runs(place: Path) -> None:
    doctor, selftest, cores, *pair, no_cores, planned, serve = commands("With a chip")
    assert (cores, no_cores) == ("export NEURON_RT_VISIBLE_CORES=0-7", "unset NEURON_RT_VISIBLE_CORES")
    assert "neuronx-cc" in run(doctor, place, chip=True)
    run(selftest, place, chip=True)
    assert "graph" in (place / "report.txt").read_text()
    compiled, generated = (run(f"{cores}; {line}", place, chip=True) for line in pair)
    assert "compiled" in compiled and generated.strip(), "random models write anything"
    assert "chat-draft" in run(planned, place, chip=True)
    check_served(serve, place)


def check_served(line: str, place: Path) -> None:
    """Answer a request, and end on Ctrl-C."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port = link.getsockname()[1]
    shell = ["bash", "-c", f"exec {line} --port {port}"]
    with (place / "stderr").open("w") as errors, subprocess.Popen(
        shell, cwd=place, env=variables(place, chip=True), stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            while "serving at" not in (said := process.stdout.readline()):
                assert said or process.poll() is None, (place / "stderr").read_text()
            asked = json.dumps({"model": "chat", "prompt": "def main(", "max_tokens": 4, "temperature": 0}).encode()
            request = Request(f"http://127.0.0.1:{port}/v1/completions", asked, {"Content-Type": "application/json"})
            assert json.load(urlopen(request))["usage"]["completion_tokens"] == 4
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0, (place / "stderr").read_text()
