"""Options of `generate`: which of them a decoder cannot follow, and where its defaults come from.

All others are those of `transformers`, which checks them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from paceline.config import DEFAULT_K
from paceline.core.errors import ConfigurationError
from paceline.decoder.decoder import CompiledDecoder

REFUSED: dict[str, str] = {
    "custom_generate": "it would run a decoding loop of its own; write a drafter, or a logits processor",
    "inputs_embeds": "graphs read token ids",
    "position_ids": "positions follow from attention_mask",
    "negative_prompt_ids": "it needs a second text in the cache for every row",
    "negative_prompt_attention_mask": "it needs a second text in the cache for every row",
    "synced_gpus": "ranks are driven by one process, with tp_degree",
}
"""Arguments of `generate` that are refused, and why."""

CHECKED = ("guidance_scale", "cache_implementation", "output_attentions", "output_hidden_states", "token_healing")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that a decoder cannot follow."""
    if options.get("guidance_scale") not in (None, 1, 1.0):
        raise ConfigurationError("guidance_scale needs a second text in the cache for every row; leave it out")
    if options.get("cache_implementation") not in (None, "dynamic", "dynamic_full"):
        raise ConfigurationError(
            f"cache_implementation={options['cache_implementation']!r}: the cache is the decoder's own; set "
            "n_positions and amp when it is loaded"
        )
    for name in ("output_attentions", "output_hidden_states", "token_healing"):
        if options.get(name):
            raise ConfigurationError(f"{name} is not to be had: a decoder's graphs give logits alone; leave it out")


def model_config(decoder: CompiledDecoder) -> PretrainedConfig:
    """The configuration of `transformers` for a decoder: its folder's, or what is known of it."""
    folder = decoder.folder
    if folder is not None and folder.is_dir() and (folder / "config.json").is_file():
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config
    model = decoder.config
    eos = list(model.eos_token_ids)
    config = PretrainedConfig()
    config.eos_token_id, config.pad_token_id = eos or None, model.pad_token_id
    config.vocab_size, config.max_position_embeddings = model.vocab_size, model.max_position_embeddings
    return config


def generation_config(decoder: CompiledDecoder, config: PretrainedConfig) -> GenerationConfig:
    folder = decoder.folder
    if folder is not None and (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    generation.num_assistant_tokens = generation.num_assistant_tokens or DEFAULT_K
    generation.assistant_confidence_threshold = 0.0
    generation.num_assistant_tokens_schedule = "constant"
    return generation
