"""One name, default and help text of an option in every command; exceptions are listed with the reason."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from typing import Any

import pytest
from typer.main import get_group

from paceline.cli import main
from paceline.cli.options import numbers
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError
from paceline.placement.planning.instances import INSTANCES

BLOCKS = {"train dflash", "train pard"}
TRAINING = {"train medusa", "train eagle"} | BLOCKS
CONFIGS = {"cost", "export-hlo", "plan-speed"}
GROUPS = {"": main.COMMANDS, **{f"{group} ": rows for group, rows in main.GROUPS.items()}}
EXCEPTIONS: dict[str, list[set[str]]] = {
    "--api-key": [{"serve"}],  # keys to accept; elsewhere the key to send
    "--aux-layers": [{"train dflash"}],  # another default
    "--backend": [{"selftest"}],  # may be left out to test all
    "--batch-size": [{"serve"}, TRAINING, {"cost", "experiment whatif"}],  # buckets, no training
    "--batch-sizes": [{"verify"}],  # a test of one size would miss faults of rows
    "--data": [{"medusa-tree"}],  # stands in for prompts
    "--draft": [{"doctor"}, {"bench"}, {"cost"}, {"plan-speed"}, {"export-hlo"}, {"experiment whatif"},
                {"experiment regret"}],
    "--draft-vocab-size": [{"train dflash"}],  # EAGLE says for which version
    "--head-layers": [{"train dflash"}, {"train pard"}],  # of a head, or of the target
    "--k": [BLOCKS, {"bench"}, {"experiment whatif"}, {"cost", "export-hlo", "experiment regret"}],  # grids, fixed ones
    "--layout": [{"convert-eagle"}],
    "--learning-rate": [{"train medusa"}],
    "--mask-token": [{"train eagle"}],  # P-EAGLE alone
    "--max-minutes": [{"verify"}, {"experiment run"}],  # what ends then differs, and tests always end
    "--out": [TRAINING, {"medusa-tree"}, {"experiment run"}, {"plan-speed"}, {"experiment export"}],
    "--prompts": [{"doctor"}, {"medusa-tree"}, {"verify"}],  # may be left out
    "--quantization": [{"cost", "plan-speed"}],  # the graphs that are counted know int8 alone
    "--sampling": [{"compile"}],  # several
    "--seed": [{"verify"}, TRAINING],
    "--start": [{"train pard"}],  # a decoder, not a head
    "--target": [{"doctor"}, CONFIGS - {"plan-speed"}, {"plan-speed"}, {"serve"}, {"selftest"}, {"experiment whatif"}],
    "--temperature": [{"train medusa"}],  # several
    "--tokens": [{"train medusa"}],
    "--tp-degree": [{"serve"}, {"plan-speed"}, {"cost", "export-hlo"}],
}  # fmt: skip
"""Of an option, sets of commands that agree with each other and need not agree with the rest."""


def options() -> dict[str, dict[str, Any]]:
    """Every option of every command: by the option's first name, by the command's."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for group, rows in GROUPS.items():
        for name, module in rows.items():
            command = get_group(import_module(f"paceline.cli.{module}").app).commands[name]
            for parameter in command.params:
                if parameter.param_type_name == "option":
                    found[parameter.opts[0]][group + name] = parameter
    return found


OPTIONS = options()


def told(option: Any) -> tuple[object, ...]:
    return option.opts, option.secondary_opts, option.default, option.required, option.help


@pytest.mark.parametrize("name", sorted(name for name, commands in OPTIONS.items() if len(commands) > 1))
def test_an_option_has_one_help_text_in_all_commands(name: str) -> None:
    commands, apart = OPTIONS[name], EXCEPTIONS.get(name, [])
    rest = commands.keys() - set[str]().union(*apart)
    for together in [rest, *apart]:
        assert together <= commands.keys()
        assert len({repr(told(commands[command])) for command in together}) <= 1, (name, together)


def test_every_option_has_a_help_text_and_one_meaning() -> None:
    for name, commands in OPTIONS.items():
        for command, option in commands.items():
            assert option.help and option.help.endswith("."), (command, name)
            for other in option.opts[1:]:
                assert command not in OPTIONS.get(other, {}), (command, name, other)


def test_old_option_names_still_work() -> None:
    for name, command, old in (
        ("--max-minutes", "verify", "--minutes"),
        ("--max-minutes", "experiment run", "--minutes"),
        ("--tp-degree", "cost", "--tp"),
        ("--num-prompts", "bench", "--count"),
        ("--draft", "experiment whatif", "--drafter"),
        ("--draft", "plan-speed", "--drafter"),
        ("--batch-sizes", "verify", "--batch-size"),
    ):
        assert old in OPTIONS[name][command].opts


def test_sampling_and_model_options_show_their_defaults() -> None:
    """In the text, where the help shows none."""
    told = {name: one["generate"] for name, one in OPTIONS.items() if "generate" in one}
    panels = ("Sampling", "Model", "Drafting")
    shown = {name: one for name, one in told.items() if one.rich_help_panel in panels and one.default is None}
    assert len(shown) > 10 and [name for name, one in shown.items() if "Default: " not in one.help] == []


def test_commands_are_in_panels_and_those_of_one_request_hide_the_batch_size() -> None:
    assert main.PANELS.keys() == {*main.COMMANDS, *main.GROUPS}
    hidden = {command for command, option in OPTIONS["--batch-size"].items() if option.hidden}
    assert hidden == {"generate", "chat", "medusa-tree"}
    assert "cpu" in INSTANCES and OPTIONS["--instance"].keys() == {"plan", "serve", *CONFIGS}


def test_number_lists_share_one_syntax() -> None:
    assert numbers("1:4", "--k") == (1, 2, 3, 4) and numbers("2,8", "--k") == (2, 8) == numbers("2,8", "--k", least=2)
    for text in ("1,2", "x", "", "4:2"):
        with pytest.raises(ConfigurationError, match="--k: expected numbers from 2 on, got"):
            numbers(text, "--k", least=2)


def test_adaptive_k_is_written_auto() -> None:
    assert SpeculativeConfig(k="auto:0,2,4").k == SpeculativeConfig(k="0,2,4").k == (0, 2, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="such as auto:0,2,4"):
        SpeculativeConfig(k="auto:4,2")  # type: ignore[arg-type]
