"""Options of a command from configuration types: names, types, defaults, help, and values that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import command, expand
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError


@dataclass(frozen=True)
class Sizes:
    """A configuration with one field of every kind."""

    width: int
    name: str = "x"
    folder: Path | None = None
    wide: bool = field(default=True, metadata={"help": "Whether the output is wide."})
    parts: tuple[int, ...] = (1, 2)
    often: Annotated[int, typer.Option("--times", help="Repeats.")] = 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigurationError("width must be at least 1")


def called(*arguments: str) -> tuple[int, object, str]:
    """Exit status, what the command was called with, and what it printed."""
    app, values = typer.Typer(), []

    @command(app)
    def run(
        file: Annotated[str, typer.Argument()], sizes: Sizes, config: SpeculativeConfig, *, loud: bool = False
    ) -> None:
        values.append((file, sizes, config, loud))

    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return done.exit_code, values[0] if values else None, done.output


def test_every_field_is_an_option() -> None:
    assert called("f", "--width", "3") == (0, ("f", Sizes(3), SpeculativeConfig(), False), "")
    options = ["--width", "3", "--name", "y", "--folder", "a/b", "--no-wide", "--parts", "4", "--parts", "5"]
    status, values, _ = called("f", *options, "--times", "2", "--loud")
    assert (status, values) == (0, ("f", Sizes(3, "y", Path("a/b"), False, (4, 5), 2), SpeculativeConfig(), True))


def test_drafts_use_the_common_syntax() -> None:
    options = ["--draft", "suffix", "--draft", "DIR:amp=f32", "--k", "0,2,4", "--no-exact", "--fused"]
    _, values, _ = called("f", "--width", "1", *options, "--confidence-threshold", "0.5")
    assert values == (
        "f",
        Sizes(1),
        SpeculativeConfig(
            draft=["suffix", {"path": "DIR", "amp": "f32"}],
            k=(0, 2, 4),
            exact=False,
            fused=True,
            confidence_threshold=0.5,
        ),
        False,
    )
    _, values, _ = called("f", "--width", "1", "--draft", '["suffix", {"path": "a:k=3"}]', "--acceptor", "match")
    assert values == ("f", Sizes(1), SpeculativeConfig(draft=["suffix", {"path": "a:k=3"}]), False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "0"], "error: width must be at least 1"),
        (["--width", "x"], "integer"),
        ([], "Missing option '--width'"),
        (["--width", "1", "--draft", "medusa"], "error: draft: expected a folder for the drafter 'medusa'"),
        (["--width", "1", "--growth", "chain"], "No such option: --growth"),
    ],
)
def test_a_rejected_value_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    status, values, output = called("f", *arguments)
    assert (status, values) == (2, None)
    assert message in " ".join(output.replace("│", "").split())


def test_help_texts_come_from_the_fields() -> None:
    output = " ".join(called("--help")[2].replace("│", "").split())
    assert "Whether the output is wide." in output
    assert "Repeats." in output
    assert "--synthetic-acceptance" in output and "NOT REAL TEXT" in output
    assert "[default: match]" in output


def test_a_command_without_configuration_is_unchanged() -> None:
    def plain(one: int, *, two: str = "x") -> str:
        return f"{one} {two}"

    assert expand(plain)(one=1, two="y") == "1 y"
