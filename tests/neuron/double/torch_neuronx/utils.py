"""The chip to compile for."""

from __future__ import annotations

import re

SUPPORTED_TYPES: dict[object, object] = {}


def get_platform_target(compiler_args: str | None = None) -> str:
    import torch_neuronx

    found = re.search(r"--target[= ](\w+)", compiler_args or "")
    return found.group(1) if found else torch_neuronx.RUNTIME.chip
