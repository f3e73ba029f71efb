"""Options of a command from configuration types: names, types, defaults, help, and values that are rejected."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import command, expand
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError, PlanError
from paceline.decoder.options import LoadOptions
from paceline.experiments.config import ExperimentConfig
from paceline.placement.planning.model_specs import read_models

DEMO = Path(__file__).parents[2] / "examples/pycode/target"


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


def test_options_take_the_names_of_vllm() -> None:
    app, values = typer.Typer(), []

    @command(app)
    def run(load: LoadOptions, config: SpeculativeConfig) -> None:
        values.append((load, config))

    options = ["--dtype", "bfloat16", "--max-model-len", "128", "--max-num-seqs", "2", "--num-speculative-tokens", "3"]
    done = CliRunner().invoke(app, [*options, "--tensor-parallel-size", "2", "--enable-prefix-caching"])
    expected = (
        LoadOptions(amp="bf16", n_positions=128, batch_size=2, tp_degree=2),
        SpeculativeConfig(k=3, prefix_caching=True),
    )
    assert (done.exit_code, values) == (0, [expected]), done.output


def test_python_and_files_take_the_names_of_vllm(tmp_path: Path) -> None:
    assert LoadOptions.of({"dtype": "float16", "max_model_len": 64}) == LoadOptions(amp="f16", n_positions=64)
    assert SpeculativeConfig(num_speculative_tokens=3, enable_prefix_caching=True).k == 3
    with pytest.raises(ConfigurationError, match=r"max_num_seqs: .* batch_size, its other name, got both; give one"):
        LoadOptions.of({"max_num_seqs": 2, "batch_size": 2})
    assert LoadOptions.of({"dtype": "half"}).amp == "f16" and LoadOptions(amp="auto") == LoadOptions()
    with pytest.raises(ConfigurationError, match=r"^dtype: expected one of bf16, .* got 'int3'"):
        LoadOptions.of({"dtype": "int3"})
    with pytest.raises(ConfigurationError, match=r"^num_speculative_tokens: expected a number .* got -1"):
        SpeculativeConfig(num_speculative_tokens=-1)
    (named,) = SpeculativeConfig(draft=f"{DEMO}:dtype=float16,num_speculative_tokens=2").draft
    assert (named.k, named.options) == (2, (("amp", "float16"),))
    file = tmp_path / "models.yaml"
    entry = f"name: a, path: {DEMO}, max_num_seqs: 2, draft: suffix, num_speculative_tokens: 3"
    file.write_text(f"models: [{{{entry}}}]")
    (spec,) = read_models(file)
    assert (spec.options.batch_size, spec.speculative.k) == (2, 3)
    file.write_text(f"models: [{{{entry}, k: 2}}]")
    with pytest.raises(PlanError, match=r"num_speculative_tokens: .* got both"):
        read_models(file)
    file.write_text(f"models: [{{name: a, path: {DEMO}, max_num_seqs: 0}}]")
    with pytest.raises(PlanError, match=r"model 'a': max_num_seqs: expected a positive number"):
        read_models(file)
    settings = {"targets": [{"path": "t", "max_model_len": 64}], "drafters": ["suffix"], "prompt_sets": ["p"]}
    made = ExperimentConfig.model_validate({**settings, "dtype": "f32"})
    assert (made.targets[0].load, made.load) == ({"n_positions": 64}, {"amp": "f32"})


def test_drafts_use_the_common_syntax() -> None:
    options = ["--draft", "suffix", "--draft", "DIR:amp=f32", "--k", "0,2,4", "--no-exact", "--fused"]
    _, values, _ = called("f", "--width", "1", *options, "--confidence-threshold", "0.5")
    drafts = ["suffix", {"path": "DIR", "amp": "f32"}]
    config = SpeculativeConfig(draft=drafts, k=(0, 2, 4), exact=False, fused=True, confidence_threshold=0.5)
    assert values == ("f", Sizes(1), config, False)
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
