"""Graphs at real width as files, and the script that has them compiled elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.neuron import compile_graphs
from tests.neuron.test_round_cost import fields

COMPILER = """
import sys
assert sys.argv[1:4] == ["compile", "--framework", "XLA"] and "--target=inf2" in sys.argv, sys.argv
options = next(one for one in sys.argv if one.startswith("--tensorizer-options="))
assert options.endswith("=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=1 --vectorize-strided-dma")
print("Compiler status PASS")
if "prefill" in sys.argv[4]:
    sys.exit("too many instructions")
open(sys.argv[sys.argv.index("--output") + 1], "wb").write(b"neff")
"""


def exported(model: Path, folder: Path, *asked: str) -> Any:
    """The manifest of a model that drafts a token for itself."""
    pair = ["--target", str(model), "--draft", str(model), "--k", "1"]
    done = CliRunner().invoke(app, ["export-hlo", str(folder), *pair, *asked])
    assert done.exit_code == 0, done.output
    return json.loads((folder / "manifest.json").read_text())


def test_graphs_of_a_pair_are_exported_with_their_costs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields("Llama-3.2-1B")))
    folder = tmp_path / "graphs"
    asked = ["--max-layers", "1", "--tp-degree", "8", "--instance", "inf2.48xlarge"]
    found = exported(tmp_path, folder, *asked)
    assert (found["tp_degree"], found["k"], found["layers"]) == (8, 1, 1)
    assert [graph["name"] for graph in found["graphs"]] == ["prefill", "round"]
    prompt, whole = found["graphs"]
    assert "-O1" in prompt["flags"] and "-O2" in whole["flags"] and whole["expected_ms"] > 0.4
    assert whole["state"]["verify.body.keys_0"] == "bfloat16[1, 1, 2176, 64]" and len(whole["changed"]) == 4
    with_xla = importlib.util.find_spec("torch_xla") is not None
    assert {graph["format"] for graph in found["graphs"]} == {"hlo" if with_xla else "fx"}
    assert (folder / whole["file"]).stat().st_size > 50_000
    if not with_xla:
        assert "all_reduce" in (folder / whole["file"]).read_text()
        done_here = subprocess.run([sys.executable, folder / "compile_graphs.py"], capture_output=True, text=True)
        assert done_here.returncode == 2 and "in an environment with torch_xla" in done_here.stderr


def test_each_graph_is_exported_as_a_module_for_torchneuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another compiler of `torch.compile` stands in for it; it sees the variables of a machine without a chip."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 512, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields("Llama-3.2-1B") | small))
    folder = tmp_path / "graphs"
    found = exported(tmp_path, folder, "--instance", "trn2.3xlarge")
    text = (folder / found["graphs"][1]["torch_file"]).read_text()
    assert "torch.ops.aten.copy_.default" in text and "paceline" not in text
    monkeypatch.setattr(compile_graphs, "TORCH", compile_graphs.TORCH.replace('"neuron"', '"eager"'))
    assert compile_graphs.main(["--folder", str(folder), "--compiler", "torch"]) == 0
    report = json.loads((folder / "report.json").read_text())
    assert (report["target"], report["compiler"]) == ("trn2", "torch")
    assert [one["status"] for one in report["graphs"]] == [0, 0], report
    monkeypatch.setattr(compile_graphs, "TORCH", "import os; print(sorted(os.environ.items())); raise SystemExit(1)")
    assert compile_graphs.main(["--folder", str(folder), "--compiler", "torch"]) == 1
    said = str(json.loads((folder / "report.json").read_text())["graphs"][0]["log"])
    assert "('NEURON_PLATFORM_TARGET_OVERRIDE', 'trn2')" in said and "('TORCH_NEURONX_COMPILE_ONLY', '1')" in said


def test_the_script_compiles_every_graph_and_reports(tmp_path: Path) -> None:
    """By a compiler that takes the arguments as documented, and refuses one graph."""
    (tmp_path / "neuronx_cc.py").write_text(COMPILER)
    flags = (
        "--target=inf2 --tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=1 "
        "--vectorize-strided-dma' -O2"
    )
    graphs = [
        {"name": name, "file": f"{name}.hlo.pb", "format": "hlo", "flags": flags, "expected_ms": 1.5}
        for name in ("prefill", "round")
    ]
    (tmp_path / "manifest.json").write_text(
        json.dumps({"instance": "inf2.48xlarge", "target": "inf2", "graphs": graphs})
    )
    compiler = f"{sys.executable} {tmp_path / 'neuronx_cc.py'}"
    assert compile_graphs.main(["--folder", str(tmp_path), "--compiler", compiler]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    refused, made = report["graphs"]
    assert report["instance"] == "inf2.48xlarge"
    assert (refused["compiled"], refused["log"][-1]) == (False, "too many instructions")
    assert (made["compiled"], made["bytes"], made["expected_ms"]) == (True, 4, 1.5)
    assert compile_graphs.main(["--folder", str(tmp_path), "--compiler", "no-such-compiler"]) == 1
    assert json.loads((tmp_path / "report.json").read_text())["graphs"][1]["status"] == 127
