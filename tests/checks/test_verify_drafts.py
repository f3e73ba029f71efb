"""`paceline verify` with heads and drafts in another process: it checks the same promises as for models."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.checks.verify import VerifySettings, verify
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import Workshop


@pytest.mark.parametrize("name", ["EAGLE 3 chain", "EAGLE 3 static tree", "Medusa chain", "remote"])
def test_heads_and_remote_drafts_pass_verify(name: str, workshop: Workshop, tmp_path: Path) -> None:
    with ExitStack() as stack:
        home = Home(workshop, tmp_path, stack, 2)
        drafter = ROWS[name].make(home, ROWS[name].depths[-1]).drafter
        settings = VerifySettings(minutes=1e-6, only=("greedy", "sampled", "repeats"), max_new_tokens=24)
        report = verify(home.target, drafter, settings)
    assert report.passed and len(report.findings) == 3, report
    assert all(finding.status == "ok" for finding in report.findings), report
