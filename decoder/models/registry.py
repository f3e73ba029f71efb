"""Which class decodes which ``model_type``: literal rows of lazy paths. A new family is one file and one row."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UnknownArchitectureError

if TYPE_CHECKING:
    from paceline.decoder.models.base import DecoderModel


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """A model family.

    name     the ``model_type`` of config.json
    path     "module:Class" of a `paceline.decoder.models.base.DecoderModel`
    summary  one line for tables
    """

    name: str
    path: str
    summary: str


MODEL_FAMILIES: dict[str, FamilyRow] = {
    row.name: row
    for row in (FamilyRow("llama", "paceline.decoder.models.llama:LlamaModel", "Llama 2 and 3, SmolLM, and the like"),)
}


def family(model_type: str, where: str = "config.json") -> type[DecoderModel]:
    """The class of a family.

    Raises:
        UnknownArchitectureError: there is none for this ``model_type``, which ``where`` names.
    """
    if model_type not in MODEL_FAMILIES:
        raise UnknownArchitectureError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_FAMILIES)}."
        )
    module, _, attribute = MODEL_FAMILIES[model_type].path.partition(":")
    found: type[DecoderModel] = getattr(importlib.import_module(module), attribute)
    return found
