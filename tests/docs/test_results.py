"""docs/results.md, docs/study.md and their charts show what benchmarks/results holds, and the site builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def report() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import report

        yield report
    for name in ("report", "report_tables", "report_charts", "study_tables"):
        sys.modules.pop(name, None)


def test_the_page_shows_the_measurements(report: ModuleType) -> None:
    reports, study = report.load(), json.loads(report.STUDY.read_text())
    for page in report.PAGES:
        assert report.page(page.read_text(), reports, study) == page.read_text(), "make it again: make charts"
    assert report.report_charts.stale(report.report_charts.due(reports, study), report.IMAGES) == []


def test_mixed_machines_or_commits_are_rejected(report: ModuleType, tmp_path: Path) -> None:
    for name, commit in (("modes", "a"), ("chat", "b")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": {}, "commit": commit, "modes": {}}))
    with pytest.raises(SystemExit, match=r"differ in commit .*modes\.json.*chat\.json"):
        report.load(tmp_path)


def test_a_missing_measurement_is_named_with_its_command(report: ModuleType) -> None:
    page = report.page("<!-- report:long -->\nold\n<!-- /report -->", {}, {})
    assert "old" not in page
    assert "benchmarks/long.py" in page


def test_tables_of_formats_show_what_their_benchmarks_print(report: ModuleType) -> None:
    ratios = {"decode1_over_read": 1.04, "verify5_over_decode1": 1.2}
    latency = {"256": {"seconds": 1.5, "speed_up": 1.31, "same_tokens": True}}
    lengths = {"positions": 1024, "prefill_s": 0.5, "prefill_tokens_per_s": 2046.0, "prompt_mb": 9.0, "cache_mb": 20.0}
    served = {"load": "1 streams", "tokens_per_s": 733.1, "offline": 2463.0, "ratio": 0.298, "failed": 0}
    served |= {"first_token_s": (0.02, 0.03), "cpu_us_per_token": {"model": 814.2}}
    rows = [{"format": "int8", "perplexity": 8.125, "weights_mb": 135.2}, {"format": "q4_0", "refused": "no blocks"}]
    reports = {
        "formats-30m": {"ms": {"int8": {"decode1": 1.17, "prefill": 30.0}}, "ratios": {"int8": ratios}},
        "latency": {"modes": {"plain": latency, "fused 2": latency}},
        "perplexity": {"perplexity": rows},
        "long": {"long": [lengths, {**lengths, "llama_cpp_s": 0.8}]},
        "load": {"load": [{"stored": "gguf", "held": "bf16", "weights_mb": 200.4, "peak": 1.04, "seconds": 2.5}]},
        "serve": {"rows": [served]},
    }
    for name, line in (
        ("formats", "| 30 M | int8 | 1.17 |  |  | 30.00 | 1.04 | 1.20 |  |"),
        ("latency", "| draft model, k = 2 | 1.50 s (1.31 x) |"),
        ("perplexity", "| int8 | 8.12 | 135 MB |"),
        ("serve", "| 1 streams | 733 | 2463 | 0.30 | 0.02 s, 0.03 s | model 814 | 0 |"),
        ("perplexity", "| q4_0 | no blocks |  |"),
        ("long", "| 1024 | 0.50 s | 2046 |  |  | 9 MB | 20 MB |"),
        ("long", "| 1024 | 0.50 s | 2046 | 0.80 s | 0.62 | 9 MB | 20 MB |"),
        ("load", "| gguf | bf16 | 200 MB | 1.04 | 2.50 s |"),
    ):
        assert line in report.block(name, reports).splitlines()


def test_every_measurement_has_a_table(report: ModuleType) -> None:
    shown = {name for needs, _ in report.TABLES.values() for name in needs}
    assert shown == set(report.COMMANDS)
    page, measured = "".join(page.read_text() for page in report.PAGES), report.load()
    assert all(f"<!-- study:{name} -->" in page for name in report.BLOCKS)
    for name, (needs, _) in report.TABLES.items():
        if f"<!-- report:{name} -->" not in page:  # then nothing was measured, and the page has the commands
            assert not any(need in measured for need in needs), name
            assert all(f"python {report.COMMANDS[need].split()[0]}" in page for need in needs), name


def test_times_from_a_busy_machine_are_labelled(report: ModuleType) -> None:
    speed, predictions = report.BLOCKS["speed"], report.BLOCKS["predictions"]
    names = {"target": "a", "drafter": "b", "k": 2, "sampling": "greedy", "batch_size": 1, "speedup": 1.25}
    cells: list[dict[str, Any]] = [{**names, "provenance": {"load": load, "cores": 2}} for load in (0.1, 5.0)]
    assert "busy" not in speed({"cells": cells[:1]}) and "| 1.25 |" in speed({"cells": cells})
    assert "1 of these 2 cells began on a busy machine" in speed({"cells": cells})
    assert "Not measured" in speed({"cells": []})
    check = {"label": "b, k 2", "predicted": 110.0, "measured": 100.0, "error": 0.1}
    load = {"trace": "a, greedy, p 1", "batch_size": 1, "verdict": "speculate: b", "verified": [check]}
    assert "| 110.0 | 100.0 | +10% |" in predictions({"predictions": [load]})


@pytest.mark.full
def test_the_site_builds_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pytest.importorskip("mkdocs.commands.build", reason="needs the extra `docs`")
    config = pytest.importorskip("mkdocs.config")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    commands.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "api" / "paceline.core.html").is_file()
