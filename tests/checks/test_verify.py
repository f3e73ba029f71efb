"""`paceline verify` passes what is right, finds what is wrong, and says what it would have found."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from paceline.checks import verify_distribution
from paceline.checks.verify import TESTS, VerifyReport, VerifySettings, verify
from paceline.checks.verify_distribution import FALSE_ALARM, POWER, chi_square, detected_share, detected_variation
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling
from paceline.draft.model import ModelHead
from paceline.engine.batch import Slot
from paceline.outputs import FinishReason
from tests.checks import faults
from tests.cli.calling import call, refused
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import Workshop
from tests.fakes import TableDecoder, joint

MANY, SAMPLES = 32, 640
"""Slots and texts of the tests of distributions."""


def report_of(target: TableDecoder, draft: object, *only: str, samples: int = 64, **options: object) -> VerifyReport:
    settings = VerifySettings(minutes=1e-6, only=only, max_new_tokens=24, min_samples=samples)
    return verify(target, draft, settings, **options)


Pair = Callable[[], tuple[TableDecoder, object, dict[str, object]]]

FAULTS: dict[str, tuple[str, Pair]] = {
    "acceptance always yes": ("greedy", lambda: (faults.target(), faults.model(), {"acceptor": faults.AlwaysYes()})),
    "a lossy rule that claims to be lossless": ("first-tokens", lambda: (
        faults.target(slots=MANY), faults.model(slots=MANY), {"acceptor": faults.Plausible(epsilon=0.02)})),
    "a cache that forgets the last row": ("greedy", lambda: (
        faults.target(faults.ForgetsLastRow), faults.model(logits=faults.TARGET), {})),
    "argmax drafts scored as drawn": ("first-tokens", lambda: (
        faults.target(slots=MANY), faults.ArgmaxAsDrawn(2, slots=MANY), {"acceptor": "reject"})),
    "positions off by one": ("sampled", lambda: (faults.target(faults.LaterNoise), faults.model(), {})),
    "one noise for two purposes": ("first-tokens", lambda: (
        faults.target(slots=MANY), faults.SharedNoise(1, slots=MANY), {"acceptor": "reject"})),
    "another temperature in verification": ("sampled", lambda: (faults.target(faults.Cooler), faults.model(), {})),
    "another temperature, by the places along texts": ("along-texts", lambda: (
        faults.target(faults.Cooler, slots=MANY), faults.model(slots=MANY, drawn=True), {"acceptor": "reject"})),
    "an accepted path that is not kept": ("greedy", lambda: (
        faults.target(faults.KeepsNoPath), faults.BranchedGuess(), {})),
    "slots that decide for each other": ("neighbours", lambda: (
        faults.target(), faults.model(), {"acceptor": faults.FirstSlot()})),
    "something left for the next call": ("repeats", lambda: (faults.target(faults.Tires), faults.model(), {})),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    test, pair = FAULTS[fault]
    target, draft, options = pair()
    report = report_of(target, draft, test, samples=SAMPLES, **options)
    assert [one.status for one in report.findings] == ["FAILED"], report
    assert not report.passed


def test_a_swallowed_stop_string_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that looks for strings where a single token comes, and not in a draft."""
    extend = Slot.extend

    def careless(self: Slot, tokens: list[int]) -> tuple[int, FinishReason | None]:
        kept = self._filter
        self._filter = kept if len(tokens) == 1 else None
        try:
            return extend(self, tokens)
        finally:
            self._filter = kept

    monkeypatch.setattr(Slot, "extend", careless)
    assert not report_of(faults.target(), faults.model(), "ends").passed


def test_a_drafters_wrong_cache_is_found(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token depends on it; but a target that drafts for itself is not accepted any more."""
    target = workshop.decoder(slots=1)
    read = ModelHead.read
    monkeypatch.setattr(
        ModelHead, "read", lambda self, tokens, *rest, **last: read(self, tokens * 0 + 1, *rest, **last)
    )
    assert not report_of(target, "ngram", "self-draft").passed  # type: ignore[arg-type]


def test_a_drafter_that_keeps_other_requests_is_noted() -> None:
    calls = []

    def moody(text: list[int]) -> list[int]:
        calls.append(text)
        return [len(calls) % faults.V] * (len(calls) % 3)

    (finding,) = report_of(faults.target(), moody, "memory").findings
    assert finding.status == "note" and "learns from texts" in finding.seen


def test_correct_drafters_pass(workshop: Workshop) -> None:
    draft, target = workshop.pair(slots=1)
    tests = [name for name in TESTS if name not in ("first-tokens", "along-texts")]
    settings = VerifySettings(minutes=1e-6, only=tests, max_new_tokens=24, prompts=[[5, 9, 5, 9, 5], [17, 3]])
    report = verify(target, draft, settings, k=3)
    assert report.passed, report
    status = {one.name: one.status for one in report.findings}
    assert len(status) == len(tests)
    assert {name for name, one in status.items() if one == "skipped"} == {"batch invariance"}
    assert all(one.detects is None or 0 < one.detects <= 1 for one in report.findings)


@pytest.mark.parametrize("name", ["EAGLE 3 chain", "EAGLE 3 static tree", "Medusa chain", "remote"])
def test_heads_and_remote_drafts_pass(name: str, workshop: Workshop, tmp_path: Path) -> None:
    with ExitStack() as stack:
        home = Home(workshop, tmp_path, stack, 2)
        drafter = ROWS[name].make(home, ROWS[name].depths[-1]).drafter
        settings = VerifySettings(minutes=1e-6, only=("greedy", "sampled", "repeats"), max_new_tokens=24)
        report = verify(home.target, drafter, settings)
    assert [finding.status for finding in report.findings] == ["ok"] * 3 and report.passed, report


@pytest.mark.parametrize("acceptor", ["reject", "typical"])
def test_a_rule_is_tested_for_what_it_declares(acceptor: str) -> None:
    target, draft = faults.target(slots=MANY), faults.model(slots=MANY, drawn=acceptor == "reject")
    tests = ("greedy", "sampled", "neighbours", "repeats", "first-tokens", "along-texts")
    report = report_of(target, draft, *tests, acceptor=acceptor)
    status = {one.name: one.status for one in report.findings}
    expected = "lossy" if acceptor == "typical" else "ok"
    assert status.pop("distribution of first tokens") == status.pop("distribution along texts") == expected
    assert status.pop("sampled tokens") == "skipped"
    assert set(status.values()) == {"ok"}
    assert "LOSSY" in str(report) or acceptor != "typical"


def test_the_reported_power_is_that_of_the_tests() -> None:
    for p, counts in ((0.5, [10, 20, 30]), (0.9, [19, 21, 20])):
        expected = [20.0, 20.0, 20.0]
        assert chi_square(counts, expected) == pytest.approx(stats.chisquare(counts, expected).pvalue), p
    samples, cells = 2000, 16
    size = detected_variation(samples, cells)
    critical = stats.chi2.isf(FALSE_ALARM, cells - 1)
    assert stats.ncx2.sf(critical, cells - 1, 4 * samples * size**2) == pytest.approx(POWER, abs=1e-4)
    # Half of the cells gain, half lose: the deviation that is the hardest to find.
    distribution = np.full(cells, 1 / cells) + size * np.repeat([1, -1], cells // 2) * 2 / cells
    dice = np.random.default_rng(0)
    found = [
        chi_square(dice.multinomial(samples, distribution).tolist(), [samples / cells] * cells) < FALSE_ALARM
        for _ in range(400)
    ]
    assert np.mean(found) == pytest.approx(POWER, abs=0.04)
    assert detected_share(100) == pytest.approx(1 - 0.05 ** (1 / 100))


def test_the_first_token_reference_is_the_table() -> None:
    distribution = verify_distribution.joint_distribution(faults.target(), [2, 5], Sampling(temperature=1.0))
    table = joint(faults.TARGET, 2, 5)
    assert len(distribution) == faults.V**3
    assert all(abs(table[key] - probability) < 1e-6 for key, probability in distribution.items())


def test_verify_command_reports_findings(workshop: Workshop) -> None:
    target, draft = workshop.checkpoint(), workshop.checkpoint("draft")
    asked = ["--target", str(target), "--draft", str(draft), "--backend", "eager", "--amp", "f32"]
    asked += ["--max-minutes", "1e-6"]
    done = call("verify", *asked, "--only", "repeats", "--batch-sizes", "1,2", "--json")
    assert done.exit_code == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["reports"][0]["draft"] == str(draft), "it says of which draft"
    assert values["passed"] and [one["batch_size"] for one in values["reports"]] == [1, 2]
    assert {one["status"] for report in values["reports"] for one in report["findings"]} == {"ok"}
    refused("--only: expected greedy", "verify", *asked, "--only", "law")


def test_invalid_settings_are_rejected() -> None:
    for wrong, message in (
        ({"minutes": 0}, "minutes: expected"),
        ({"only": ["x"]}, "--only: expected"),
        ({"max_new_tokens": 2}, "24"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            VerifySettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="prompts: expected at least"):
        verify(faults.target(), "ngram", VerifySettings(prompts=[[1] * 60]))
