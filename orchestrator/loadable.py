"""A checkpoint and its loading options, checked before its weights are opened.

This module does not need PyTorch, so that errors are reported at once. `paceline.auto` loads checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.acceptance.base import AcceptanceRule
from paceline.decoder import memory
from paceline.decoder.backends import registry
from paceline.decoder.models.config import ModelConfig, check_positions
from paceline.decoder.options import DecoderOptions, LoadOptions, decoder_options
from paceline.decoder.parallel import sharding
from paceline.decoder.weights.folder import check_kept, find_weight_files, is_gguf
from paceline.decoder.weights.hub import checkpoint_path
from paceline.engine.request import TargetLimits
from paceline.text.structured_output import GrammarCompiler

if TYPE_CHECKING:
    from paceline.decoder.decoder import CompiledDecoder


@dataclass(frozen=True, slots=True)
class Loadable:
    """Properties of a decoder before it is loaded.

    folder   of the checkpoint, or its GGUF file; None: it was made without a file
    """

    folder: Path | None
    config: ModelConfig
    options: DecoderOptions

    @property
    def backend_name(self) -> str:
        return self.options.load.backend


def loadable(path: str | os.PathLike[str], load: LoadOptions) -> Loadable:
    """Find the checkpoint of `AutoDecoder.from_pretrained`; same errors."""
    place = checkpoint_path(path)
    config = ModelConfig.from_pretrained(place)
    layout = sharding.layout(config, load.tp_degree, load.group_query_attention)
    options = decoder_options(load, config.max_position_embeddings, layout)
    if load.n_positions is None and load.backend in registry.BACKENDS and not registry.BACKENDS[load.backend].compiles:
        options = memory.fitting_options(sharding.Shard(config, layout), load, memory.machine_bytes())
    check_positions(config.rope, options.n_positions)
    registry.check(load.backend, load.tp_degree, load.quantization, kv_cache_dtype=load.kv_cache_dtype)
    check_kept(place, load.quantization)
    if not is_gguf(place):
        find_weight_files(place)  # whether there are any
    return Loadable(place, config, options)


def request_limits(target: Loadable | CompiledDecoder, rule: AcceptanceRule) -> TargetLimits:
    """Return the limits of a target for requests, as set by its configuration and the acceptance rule."""
    config = target.config
    refusal: str | None = None
    if not rule.on_host:
        refusal = (
            f"acceptance by {rule.name!r} decides on the device, without logits processors and scores; leave them out, "
            "or use acceptor='match'"
        )
    return TargetLimits(
        config.vocab_size,
        target.options.n_positions,
        tuple(config.eos_token_ids),
        host_refusal=refusal,
        grammars=_grammars(config.vocab_size),
    )


@lru_cache(maxsize=1)
def _grammars(vocab_size: int) -> GrammarCompiler:
    """Return the compiler shared by all targets of a size: a grammar compiled for a check is reused by the run."""
    return GrammarCompiler(vocab_size)
