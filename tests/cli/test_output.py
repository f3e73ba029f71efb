"""Output in a separate process: results that cannot be written, and terminals that are narrow, colourless or ASCII."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.console import TextView, bar
from paceline.outputs import RequestOutput
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import call

COMMAND = [sys.executable, "-c", "from paceline.cli.main import app; app()"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_unwritable_results_are_reported_in_one_line() -> None:
    command = [*COMMAND, "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr == "error: the output cannot be written (No space left on device)\n"
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode == 1


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["generate", "--help"]], ids=" ".join)
def test_a_closed_pipe_is_not_an_error(arguments: list[str]) -> None:
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode in (0, 1)


def test_an_ascii_locale_gets_ascii_and_no_traceback(home: Path) -> None:
    text = ["generate", "--target", str(home / "target"), "--backend", "eager", "--prompt", "def", "--stats"]
    for arguments in (text, ["list"], ["list", "gr\u00f6\u00dfe"]):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, env={**os.environ, **ASCII}, timeout=120)
        assert done.returncode == (2 if arguments[-1].startswith("gr") else 0), done.stderr
        assert done.stdout.isascii() and done.stderr.isascii() and b"Traceback" not in done.stderr
        assert arguments is not text or b"?" in done.stdout, "of a random model there are other letters too"


@pytest.mark.parametrize("columns", [80, 40])
def test_the_list_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = call("list").stdout
    assert max(map(len, shown.splitlines())) <= columns
    if columns == 80:  # nothing is cut
        assert "\u2026" not in shown and "prompt_lookup_max=3" in shown and "--draft suffix" in shown


def test_list_prints_one_drafter() -> None:
    shown = call("list", "suffix").stdout
    assert "suffix: " in shown and "min_match=2" in shown and "ngram" not in shown
    assert "alpha=" in call("list", "typical").stdout
    families = json.loads(call("list", "models", "--json").stdout)
    assert list(families) == ["model families"] and len(families["model families"]) > 60
    heads = {row["name"]: row["heads"] for row in families["model families"]}
    assert (heads["llama"], heads["deepseek_v3"], heads["phi"]) == ("all", "all, mtp", "no dflash")
    done = call("list", "nobody")
    assert done.exit_code == 2 and "error: NAME: expected one of none, ngram" in done.stderr


def test_no_color_keeps_what_is_drafted_bold(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(home / "target")
    tokens, written = tuple(tokenizer.encode("xy")), io.StringIO()
    terminal = Console(file=written, force_terminal=True, color_system="standard", _environ={"NO_COLOR": "1"})
    TextView(terminal, tokenizer, []).show(RequestOutput(0, tokens, accepted=1, finish_reason="length"))
    assert written.getvalue() == "\x1b[1mx\x1b[0my"


def test_progress_shows_the_time_left_on_a_terminal_and_plain_lines_elsewhere() -> None:
    texts = {}
    for terminal in (True, False):
        written = io.StringIO()
        shown = Console(file=written, force_terminal=terminal, width=100, _environ={})
        with bar(shown, "working", 10, still=True) as progress:
            progress.advance(5)
        texts[terminal] = written.getvalue()
    assert " left " in texts[True] and "5/10" in texts[True]
    assert texts[False] == "working\n"
