"""A checkpoint as a model of transformers: to train heads on, and to compare with. Not how Paceline decodes."""

from __future__ import annotations

import os
from typing import Any

import torch

from paceline.core.errors import CheckpointError
from paceline.decoder.gguf.checkpoint import read_config
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.locate import checkpoint_path


def transformers_model(path: str | os.PathLike[str], dtype: torch.dtype) -> Any:
    """The causal language model of a folder, a GGUF file or a fetched model, for inference.

    GGUF files are read by Paceline: transformers passes over rope scaling in them.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    place = checkpoint_path(path)
    if not is_gguf(place):
        try:
            return AutoModelForCausalLM.from_pretrained(place, dtype=dtype, local_files_only=True).eval()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place} is not a checkpoint that transformers can load ({error})") from error
    weights = load_weights(place, ModelConfig.from_pretrained(place), dtype)
    keys: dict[str, Any] = read_config(place)
    config = AutoConfig.for_model(**keys)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
