"""`paceline doctor` and `paceline selftest`: they say what is wrong, and fail when something is."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from paceline.checks import doctor, selftest
from paceline.cli.main import app
from paceline.core.types import SamplingTensors
from paceline.decoder.backends import eager, registry
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.neuron import machine

LS = """#!/bin/sh
echo '[{"neuron_device": 0, "nc_count": 2, "neuron_processes": [{"pid": 77}]}, {"neuron_device": 1, "nc_count": 2}]'
"""


def test_a_machine_without_neuron_is_reported_healthy() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(done.stdout)
    named = {line["subject"]: line for line in found["lines"]}
    assert named["torch"]["text"] == torch.__version__
    assert named["Neuron chips"]["level"] == named["Neuron SDK"]["level"] == "note"
    assert "none" in named["Neuron chips"]["text"] and "neuron.md" in named["Neuron SDK"]["text"]
    assert done.exit_code == 0 and found["healthy"]


@pytest.mark.parametrize("writable", [False, True], ids=["read-only", "a file"])
def test_an_unusable_cache_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writable: bool) -> None:
    (tmp_path / "file").write_text("no folder")
    if not writable:
        monkeypatch.setattr(doctor.os, "access", lambda *_args: False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / ("file" if writable else "cache")))
    (finding,) = (one for one in doctor.examine() if one.name == "cache")
    assert not finding.passed and "PACELINE_CACHE" in finding.seen
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_neuron_ls_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "neuron-ls"
    program.write_text(LS)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ((_, status, text),) = machine._cores()
    assert (status, text) == ("note", "2 devices, 4 cores; used by processes 77")
    program.write_text("#!/bin/sh\necho nonsense\n")
    ((_, status, text),) = machine._cores()
    assert status == "FAILED" and "failed" in text
    program.unlink()
    ((_, status, text),) = machine._cores()
    assert status == "FAILED" and "aws-neuronx-tools" in text


def test_a_correct_backend_passes_the_selftest() -> None:
    done = CliRunner().invoke(app, ["selftest", "--backend", "eager"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count("ok  ") == 5 and "0 of 6144 limbs differ" in done.stdout
    assert "\n- Neuron SDK: " in done.stdout and f"\n- torch: {torch.__version__}" in done.stdout


class Off(TorchKernels):
    """Chooses the id after the right one, now and then."""

    def sample_tokens(self, logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, stream: int = 0) -> Tensor:
        found = super().sample_tokens(logits, positions, sampling, stream=stream)
        return torch.where(positions % 7 == 6, (found + 1) % logits.shape[-1], found)


class OffBackend(eager.EagerBackend):
    """A backend that is wrong."""

    def __init__(self) -> None:
        self.kernels = Off()


def test_bf16_texts_may_differ_at_near_ties_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """`native` rounds activations, `eager` does not."""
    assert [one.name for one in selftest.run("native") if not one.passed] == []
    monkeypatch.setattr(selftest, "NEAR_TIE", 1e-6)
    assert [one.name for one in selftest.run("native") if not one.passed] == ["plain, bf16"]


def test_a_wrong_backend_fails_the_selftest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "OffBackend", OffBackend, raising=False)
    row = registry.BackendRow("off", "paceline.decoder.backends.eager:OffBackend", "off by one")
    monkeypatch.setitem(registry.BACKENDS, "off", row)
    checks = list(selftest.run("off"))
    assert [check.name for check in checks if check.passed] == ["noise"]
    done = CliRunner().invoke(app, ["selftest", "--backend", "off"])
    assert done.exit_code == 1 and "FAIL plain, f32" in done.stdout


def test_a_check_that_raises_fails_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_backend: str) -> tuple[bool, str]:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(selftest, "_noise", broken)
    checks = list(selftest.run("eager"))
    assert [check.name for check in checks if not check.passed] == ["noise"] and len(checks) == 5
    assert checks[0].seen == "RuntimeError: the device is on fire"


def test_an_unknown_backend_is_rejected_before_anything_runs_and_a_missing_one_fails_with_a_remedy() -> None:
    missing = CliRunner().invoke(app, ["selftest", "--backend", "neuron"])
    assert missing.exit_code != 0 and "set up the Neuron SDK" in missing.output
    done = CliRunner().invoke(app, ["selftest", "--backend", "cuda"])
    assert done.exit_code == 2 and not done.stdout
    known = "eager, native, xla, neuron, neuron-native"
    assert done.stderr == f"error: backend: expected one of {known}, got 'cuda'; use one of them\n"
