"""Parts of the documentation that are written from the code: `<!-- generated:NAME -->` in a page of docs/.

The built site shows them (`docs_pages.py`); in the sources the marker stands alone.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer

from paceline.cli.catalog import registry_tables
from paceline.cli.main import app
from paceline.core import errors
from paceline.neuron_config import key_tables


def generated(markdown: str) -> str:
    """The page with every marker replaced."""
    return re.sub(r"<!-- generated:(\w+) -->", lambda match: PARTS[match[1]](), markdown)


def commands() -> str:
    return "\n".join(_command(typer.main.get_command(app), "paceline"))


def _command(command: Any, name: str) -> list[str]:
    context = command.context_class(command, info_name=name)
    if hasattr(command, "list_commands"):
        found = (command.resolve_command(context, [one])[:2] for one in command.list_commands(context))
        return [line for one, inner in found for line in _command(inner, f"{name} {one}")]
    lines = [f"## `{name}`", "", inspect.cleandoc(command.help or ""), "", "| option | meaning |", "|---|---|"]
    for option in command.params:
        if not getattr(option, "hidden", False):
            text = " ".join((getattr(option, "help", None) or "").split()).replace("|", "\\|")
            lines.append(f"| `{', '.join(option.opts)}` | {text} |")
    return [*lines, ""]


def error_classes() -> str:
    rows = [
        f"| `{name}` | {' '.join((inspect.getdoc(value) or '').split(chr(10) * 2)[0].split())} |"
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.PacelineError)
    ]
    return "\n".join(["| error | meaning |", "|---|---|", *rows])


def neuron_config_keys() -> str:
    """Keys of `NeuronConfig` without effect, and those that are rejected."""
    tables, reasons = key_tables(), dict[str, list[str]]()
    for key, reason in tables.without_effect.items():
        reasons.setdefault(reason, []).append(f"`{key}`")
    lines = ["These change nothing:", "", "| names | reason |", "|---|---|"]
    lines += [f"| {', '.join(keys)} | {reason} |" for reason, keys in reasons.items()]
    lines += ["", "These are rejected unless they have a value that asks for nothing:", ""]
    lines += ["| name | accepted values | otherwise |", "|---|---|---|"]
    for key, (values, reason) in tables.refused.items():
        lines.append(f"| `{key}` | {', '.join(f'`{value!r}`' for value in values)} | {reason} |")
    return "\n".join(lines)


def families() -> str:
    """Model families with the GGUF architectures and quantised checkpoints read as them, and the heads that draft."""
    rows = [
        f"| `{one['name']}` | {one['summary']} | {one['gguf'] or 'no'} | {one['quantised']} | {one['heads']} |"
        for one in registry_tables()["model families"]
    ]
    head = "| `model_type` | models | GGUF architecture | [quantised](quantization.md#load-a-quantised-checkpoint) | \
heads |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def layouts() -> str:
    rows = [
        f"| {one['name']} | `{one['quant_method']}` | {one['summary']} |"
        for one in registry_tables()["quantised checkpoints"]
    ]
    return "\n".join(["| layout | `quant_method` | weights |", "|---|---|---|", *rows])


PARTS = {
    "families": families,
    "layouts": layouts,
    "commands": commands,
    "errors": error_classes,
    "neuron_config_keys": neuron_config_keys,
}
