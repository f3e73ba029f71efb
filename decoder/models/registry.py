"""Model families by the ``model_type`` of config.json. A new family is one row of a ``families`` module."""

from __future__ import annotations

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.models import families, families_experts, families_gemma, families_gpt
from paceline.decoder.models.family import Family

MODEL_FAMILIES: dict[str, Family] = {
    row.name: row for module in (families, families_experts, families_gpt, families_gemma) for row in module.FAMILIES
}

_SAME = {"kimi_k2": "deepseek_v3"}
"""Other values of ``model_type`` for the same network and the same keys."""


def family(model_type: str, where: str = "config.json") -> Family:
    """Return the row of a family; raise UnknownArchitectureError, which names ``where``, if there is none."""
    model_type = _SAME.get(model_type, model_type)
    if model_type not in MODEL_FAMILIES:
        raise UnknownArchitectureError(
            f"{where}: model_type: expected one of {', '.join(MODEL_FAMILIES)}, got {model_type!r}; use a supported "
            "model"
        )
    return MODEL_FAMILIES[model_type]
