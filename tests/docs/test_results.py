"""docs/results.md and its charts show what benchmarks/results holds, and the site builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def report() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import report

        yield report
    for name in ("report", "report_tables", "report_charts"):
        sys.modules.pop(name, None)


def test_the_page_shows_the_measurements(report: ModuleType) -> None:
    reports = report.load()
    assert report.page(report.PAGE.read_text(), reports) == report.PAGE.read_text()
    assert report.report_charts.stale(reports, report.IMAGES) == []


def test_a_mixture_of_machines_or_commits_is_refused(report: ModuleType, tmp_path: Path) -> None:
    for name, commit in (("modes", "a"), ("pair", "b")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {}, "commit": commit, "modes": {}}))
    with pytest.raises(SystemExit, match=r"differ in commit .*modes\.json.*pair\.json"):
        report.load(tmp_path)


def test_a_missing_measurement_is_named_with_its_command(report: ModuleType) -> None:
    page = report.page("<!-- report:copier -->\nold\n<!-- /report -->", {})
    assert "old" not in page
    assert "benchmarks/fused.py --part copier" in page


def test_every_measurement_has_a_table(report: ModuleType) -> None:
    shown = {name for needs, _ in report.TABLES.values() for name in needs}
    assert shown == set(report.COMMANDS)
    assert all(f"<!-- report:{name} -->" in report.PAGE.read_text() for name in report.TABLES)


def test_the_site_builds_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pytest.importorskip("mkdocs.commands.build", reason="needs the extra `docs`")
    config = pytest.importorskip("mkdocs.config")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    commands.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "api" / "paceline.core.html").is_file()
