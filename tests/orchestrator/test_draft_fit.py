"""A drafter that does not fit its target says so once; one that fits, and one that may well miss, say nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline import SpeculativeGenerator
from paceline.checks import doctor
from paceline.cli.main import app
from paceline.config import SpeculativeConfig
from paceline.core.types import Commit, RoundReport, RoundResult
from paceline.engine import fit
from paceline.engine.fit import ENOUGH_DRAFTS, DraftFit
from paceline.workers.shared_engine import SharedEngine
from tests.decoder.tiny import Workshop
from tests.draft.random_heads import mlp_speculator, mtp

NOWHERE = Commit(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1).int(), torch.zeros(1).int())


def result(accepted: int, seconds: float) -> RoundResult:
    """A round that drafts four tokens and verifies for a second."""
    return RoundResult(NOWHERE, [RoundReport([[7] * (accepted + 1)], [4], seconds)], seconds - 1, 1.0)


@pytest.mark.parametrize(
    ("accepted", "plain", "seconds", "fused", "fits"),
    [
        ([0], None, 2.0, True, False),  # no times: only what is accepted nearly never
        ([0, 0, 0, 0, 1], None, 9.0, True, True),
        ([1], 1.0, 2.0, True, True),  # a round takes two plain steps and yields two tokens
        ([0, 1], 1.0, 2.0, True, True),  # it does not pay, but nearly
        ([0, 0, 1], 1.0, 2.0, True, False),
        ([0, 0, 1], 1.0, 1.2, True, True),  # cheap rounds pay with little
        ([0, 0, 1], None, 2.0, False, False),  # a verification in its own graph stands for a plain step
    ],
)
def test_acceptance_is_compared_with_the_break_even(
    accepted: list[int], plain: float | None, seconds: float, fused: bool, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    made = DraftFit("AHead", "its layer ids")
    for _ in range(3 if plain is not None else 0):
        made.learn(RoundResult(NOWHERE, [RoundReport([[7] * 2], [0], 2 * (plain or 0))]), fused=fused)
    for number in range(ENOUGH_DRAFTS):
        made.learn(result(accepted[number % len(accepted)], seconds), fused=fused)
    assert made.judged and made.fits == fits and bool(made.warning) != fits
    assert made.gained == pytest.approx(sum(accepted) / len(accepted), abs=0.01)
    made.learn(result(0, 2.0), fused=fused)
    assert len(caplog.records) == (0 if fits else 1), "once"
    if not fits:
        assert "draft: AHead does not fit this target: " in caplog.text
        assert "likely causes: its layer ids" in caplog.text
        assert ("rounds pay from 1.00 on" in caplog.text) == (plain is not None or not fused)


@pytest.mark.parametrize("head", ["MTP", "MLP speculator"])
def test_a_random_head_is_warned_about_once_and_in_the_metrics(
    workshop: Workshop,
    tmp_path: Path,
    head: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "ENOUGH_DRAFTS", 40)
    caplog.set_level(logging.WARNING, "paceline")
    target = workshop.decoder(slots=1)
    drafter = mtp(target, 3) if head == "MTP" else mlp_speculator(tmp_path, target, 3)
    generator = SpeculativeGenerator(drafter, target)
    for _ in range(2):
        generator.sample([[5, 17, 17]], max_new_tokens=60)
    assert caplog.text.count(f"draft: {type(drafter).__name__} does not fit this target") == 1
    assert "another base model" in caplog.text
    assert "does not fit" in SharedEngine(generator).figures().misfit
    monkeypatch.delattr(DraftFit, "learn")
    generator.sample([[5, 17, 17]], max_new_tokens=20)  # a judged drafter's rounds are not watched


def test_a_text_drafter_causes_no_misfit_warning(workshop: Workshop) -> None:
    target = workshop.decoder(slots=1)
    for draft in ("ngram", None, ["ngram", "suffix"]):
        assert SpeculativeGenerator(draft, target, k=2 if draft else 0).draft_fit is None
    assert SpeculativeGenerator("layerskip:layers=1", target, synthetic_acceptance=0.0).draft_fit is None


def test_doctor_measures_drafter_fit(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "ENOUGH_DRAFTS", 40)
    target = workshop.decoder(slots=1)
    mlp_speculator(tmp_path, target, 3)
    found = doctor.examine_draft(target, SpeculativeConfig(draft=str(tmp_path)), [[5, 17, 17]])
    assert found.status == "note" and "does not fit" in found.seen and "rounds pay from" in found.seen
    assert not found.seen.startswith("draft:")  # which is the name of the finding
    assert doctor.examine_draft(target, SpeculativeConfig(draft="ngram")).status == "note"
    monkeypatch.setattr(doctor, "examine", list)
    done = CliRunner().invoke(
        app, ["doctor", "--target", str(workshop.checkpoint()), "--draft", str(tmp_path), "--json"]
    )
    (line,) = json.loads(done.stdout)["lines"]
    assert done.exit_code == 0 and line["subject"] == "draft" and "likely causes" in line["text"]
    alone = CliRunner().invoke(app, ["doctor", "--draft", "ngram"])
    assert alone.exit_code == 2 and "expected --target and --draft together" in alone.output
