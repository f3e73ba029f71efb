"""`paceline selftest --batch-invariance`: it counts the logits whose bits depend on the number of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

from paceline.checks import batch_invariance
from paceline.cli.main import app
from paceline.decoder.backends import eager, registry
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.steps import window
from tests.decoder.tiny import VOCABULARY, Workshop

TEXTS = batch_invariance.TEXTS


class Promising(TorchKernels):
    """Kernels that promise too much."""

    batch_invariant = True


class PromisingBackend(eager.EagerBackend):
    """A backend of such kernels."""

    def __init__(self) -> None:
        self.kernels = Promising()


@pytest.fixture
def promising(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(eager, "PromisingBackend", PromisingBackend, raising=False)
    row = registry.BackendRow("promising", "paceline.decoder.backends.eager:PromisingBackend", "breaks its promise")
    monkeypatch.setitem(registry.BACKENDS, "promising", row)
    return "promising"


def nudged(decoder: CompiledDecoder, tokens: Tensor, row: Tensor, *, bucket: int) -> tuple[Tensor, None]:
    """Logits of a window; that of id 5 is another number where three rows or more are computed together."""
    logits, _ = window(decoder, tokens, row, bucket=bucket)
    logits[..., 5] += 64.0 * (tokens.numel() >= 3)
    return logits, None


def selftest(*options: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["selftest", "--batch-invariance", *map(str, options)])
    return done.exit_code, done.stdout, done.stderr


def test_differing_logits_are_counted_and_a_broken_promise_fails(
    workshop: Workshop, promising: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariance.steps, "window", nudged)
    code, out, _ = selftest("--backend", promising, "--target", workshop.checkpoint(), "--rows", 4, "--json")
    found = json.loads(out)
    assert code == 1 and not found["passed"] and found["missing"] == {}
    series = [(one["backend"], one["amp"], one["error"]) for one in found["series"]]
    assert series == [(promising, "f32", ""), (promising, "bf16", "")]
    counts = {(one["shape"], one["rows"]): one for one in found["series"][0]["counts"]}
    assert counts.keys() == {(shape, rows) for shape in ("window", "batch") for rows in range(1, 5)}
    for (shape, rows), one in counts.items():
        tokens = rows * (TEXTS if shape == "window" else 1)
        wrong = 0 if rows < 3 else tokens
        assert (one["tokens"], one["outputs"]) == (tokens, tokens * VOCABULARY)
        assert one["other"] == wrong, (shape, rows)
        if shape == "batch" or rows == 1:  # in windows the attention of plain PyTorch adds differences of its own
            assert one["differing"] == wrong, (shape, rows)
        else:
            assert one["differing"] >= wrong, (shape, rows)
        assert one["largest"] == pytest.approx(64.0 if wrong else 0.0, abs=0.01)


def test_table_lists_every_series_and_the_missing_ones(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    only = {name: registry.BACKENDS[name] for name in ("eager", "neuron")}
    monkeypatch.setattr(batch_invariance, "BACKENDS", only)
    code, out, err = selftest("--target", workshop.checkpoint(), "--rows", 2)
    assert code == 0, "eager promises nothing"
    assert "| M | eager f32 window | eager f32 batch | eager bf16 window | eager bf16 batch |" in out
    assert "| 1 | 0 | 0 | 0 | 0 |" in out and "\n| 2 | " in out
    assert "- eager, bf16: " in out and "- neuron: " in out and "set up the Neuron SDK" in out
    assert "eager, f32: ok" in err


def test_a_series_that_raises_fails(workshop: Workshop, promising: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def burning(*_given: object) -> Tensor:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(Promising, "linear", burning)
    code, out, _ = selftest("--backend", promising, "--target", workshop.checkpoint(), "--rows", 1)
    assert code == 1 and out.count("RuntimeError: the device is on fire") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "nowhere"], "nowhere: expected a folder"),
        (["--rows", "0"], "rows: expected 1 to 64, got 0"),
        (["--backend", "cuda"], "got 'cuda'"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_runs(options: list[str], message: str) -> None:
    code, out, err = selftest(*options)
    assert (code, out) == (2, "") and message in " ".join(err.split())


def test_batch_invariance_options_need_the_batch_invariance_flag(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["selftest", "--target", str(tmp_path)])
    assert done.exit_code == 2 and "--target: expected --batch-invariance with it" in done.stderr


def test_selftest_prints_json() -> None:
    done = CliRunner().invoke(app, ["selftest", "--backend", "eager", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["passed"] and found["backend"] == "eager"
    assert [check["name"] for check in found["checks"]][:2] == ["noise", "plain, f32"]
