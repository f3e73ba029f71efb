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
    for row in (
        FamilyRow("llama", "paceline.decoder.models.llama:LlamaModel", "Llama 2 and 3, SmolLM, and the like"),
        FamilyRow("qwen3", "paceline.decoder.models.qwen3:Qwen3Model", "Qwen3, dense"),
        FamilyRow("qwen3_moe", "paceline.decoder.models.qwen3_moe:Qwen3MoeModel", "Qwen3, mixture of experts"),
        FamilyRow("qwen2", "paceline.decoder.models.qwen2:Qwen2Model", "Qwen 2 and 2.5"),
        FamilyRow("mistral", "paceline.decoder.models.mistral:MistralModel", "Mistral, sliding window"),
        FamilyRow("mixtral", "paceline.decoder.models.mixtral:MixtralModel", "Mixtral, mixture of experts"),
        FamilyRow("phi3", "paceline.decoder.models.phi3:Phi3Model", "Phi-3 and Phi-4, text only"),
        FamilyRow("gemma2", "paceline.decoder.models.gemma2:Gemma2Model", "Gemma 2"),
        FamilyRow("gemma3_text", "paceline.decoder.models.gemma3:Gemma3Model", "Gemma 3, text only"),
        FamilyRow("gpt2", "paceline.decoder.models.gpt2:Gpt2Model", "GPT-2"),
        FamilyRow("gpt_neox", "paceline.decoder.models.gpt_neox:GptNeoxModel", "GPT-NeoX, Pythia"),
        FamilyRow("gptj", "paceline.decoder.models.gptj:GptjModel", "GPT-J"),
        FamilyRow("opt", "paceline.decoder.models.opt:OptModel", "OPT, with norms before"),
        FamilyRow("bloom", "paceline.decoder.models.bloom:BloomModel", "BLOOM, ALiBi"),
    )
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
    model_class: type[DecoderModel] = getattr(importlib.import_module(module), attribute)
    return model_class
