"""A model as a plain float32 forward through transformers, for what learns from it: its states and its own text.

Only training uses it; decoding is `paceline.decoder.decoder`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, ConfigurationError

PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16}


def products(precision: str) -> torch.autocast:
    """A block in which matrices are multiplied in "f32" or "bf16" (autocast: weights and sums of losses stay float32).

    bf16 is two to three times as fast on a CPU with instructions for it (avx512_bf16, AMX), and slower on others.

    Raises:
        ConfigurationError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise ConfigurationError(f"precision={precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


class FrozenModel:
    """A checkpoint that transformers can load, without gradients.

    Raises:
        CheckpointError: it cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} is no checkpoint that transformers can load ({error})") from error
        model.eval().requires_grad_(False)
        self._model: Any = model

    def fingerprint(self) -> str:
        """Tells this model from another one, wherever its files lie."""
        config = {name: value for name, value in self._model.config.to_dict().items() if name != "_name_or_path"}
        sums = {name: float(x.sum(dtype=torch.float64)) for name, x in self._model.named_parameters()}
        return hashlib.sha256(json.dumps([config, sums], sort_keys=True, default=str).encode()).hexdigest()

    @torch.no_grad()
    def continued(self, prompts: Tensor, length: int, *, temperature: float = 0.0) -> Tensor:
        """prompts [n, S] -> [n, S + length], written by the model itself, greedily at temperature 0."""
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
        found: Tensor = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            **{"do_sample": False, **sampled},
        )
        return found
