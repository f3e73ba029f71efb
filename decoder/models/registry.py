"""Which class decodes which ``model_type``: literal rows of lazy paths. A new family is one class and one row."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UnknownArchitectureError

if TYPE_CHECKING:
    from paceline.decoder.models.family import Family


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """A model family.

    name     the ``model_type`` of config.json
    path     "module:Class" of a `paceline.decoder.models.family.Family`
    summary  one line for tables
    """

    name: str
    path: str
    summary: str


MODEL_FAMILIES: dict[str, FamilyRow] = {
    row.name: row
    for row in (
        FamilyRow("llama", "paceline.decoder.models.llama:LlamaFamily", "Llama 2 and 3, SmolLM, and the like"),
        FamilyRow("qwen3", "paceline.decoder.models.families:Qwen3Family", "Qwen3, dense"),
        FamilyRow("qwen3_moe", "paceline.decoder.models.families:Qwen3MoeFamily", "Qwen3, mixture of experts"),
        FamilyRow("qwen2", "paceline.decoder.models.families:Qwen2Family", "Qwen 2 and 2.5"),
        FamilyRow("mistral", "paceline.decoder.models.families:MistralFamily", "Mistral, sliding window"),
        FamilyRow("mixtral", "paceline.decoder.models.families:MixtralFamily", "Mixtral, mixture of experts"),
        FamilyRow("phi3", "paceline.decoder.models.families:Phi3Family", "Phi-3 and Phi-4, text only"),
        FamilyRow("gemma2", "paceline.decoder.models.families:Gemma2Family", "Gemma 2"),
        FamilyRow("gemma3_text", "paceline.decoder.models.families:Gemma3Family", "Gemma 3, text only"),
        FamilyRow("gpt2", "paceline.decoder.models.families:GPT2Family", "GPT-2"),
        FamilyRow("gpt_neox", "paceline.decoder.models.families:GPTNeoXFamily", "GPT-NeoX, Pythia"),
        FamilyRow("gptj", "paceline.decoder.models.families:GPTJFamily", "GPT-J"),
        FamilyRow("opt", "paceline.decoder.models.families:OPTFamily", "OPT, with norms before"),
        FamilyRow("bloom", "paceline.decoder.models.families:BloomFamily", "BLOOM, ALiBi"),
    )
}


def family(model_type: str, where: str = "config.json") -> type[Family]:
    """The class of a family.

    Raises:
        UnknownArchitectureError: there is none for this ``model_type``, which ``where`` names.
    """
    if model_type not in MODEL_FAMILIES:
        raise UnknownArchitectureError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_FAMILIES)}."
        )
    module, _, attribute = MODEL_FAMILIES[model_type].path.partition(":")
    found: type[Family] = getattr(importlib.import_module(module), attribute)
    return found
