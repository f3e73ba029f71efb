"""`AutoDecoder.from_pretrained`: a Hugging Face folder becomes a decoder that can `sample`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline import build
from paceline.core.acceptance.match import Match
from paceline.decoder import kv_memory
from paceline.decoder.backends.base import make
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.rope import check_positions
from paceline.decoder.options import decoder_options
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.sharding import GQA, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.draft.none import NoDrafter
from paceline.engine import warmup
from paceline.engine.engine import Engine
from paceline.outputs import Statistics
from paceline.sampler import Sampler


class SamplingDecoder(CompiledDecoder, Sampler):
    """A compiled decoder that decodes plainly by itself, and is a draft or a target of a `SpeculativeGenerator`."""

    def compile(self, width: int | None = None) -> None:
        """Make every graph plain decoding needs, so that no call has to wait for one."""
        warmup.up(self._engine(build.CallOptions(width=width)), self._decoders())

    def _decoders(self) -> list[CompiledDecoder]:
        return [self]

    def _engine(self, demands: build.CallOptions) -> Engine:
        return build.engine(self, NoDrafter(), build.Plan(Match()), demands=demands)


class AutoDecoder:
    """Finds out from a folder's config.json which family it is."""

    @staticmethod
    def from_pretrained(
        path: str | os.PathLike[str],
        *,
        batch_size: int = 1,
        n_positions: int | Sequence[int] | None = None,
        context_length_estimate: int | Sequence[int] | None = None,
        amp: str = "bf16",
        backend: str = "inductor",
        tp_degree: int = 1,
        group_query_attention: GQA | str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SamplingDecoder:
        """Load a decoder.

        path                     folder with config.json and safetensors or .bin weights, whole or sharded
        batch_size               slots; fixed
        n_positions              longest text, or the ascending list of buckets of the cache length; default: what the
                                 model was trained on. A single number gives buckets 128, 256, 512, ... up to it
        context_length_estimate  lengths of the prefill graphs; default 64 and 256
        amp                      "bf16", "f16" or "f32": number format of weights and cache
        backend                  "inductor" (compiled, CPU), "eager", "neuron", or "xla" (to try graphs out)
        tp_degree                tensor parallelism: over how many ranks the model is divided; above 1 with "eager"
                                 (ranks are processes, which end with the decoder: see ``close``) and "neuron" (cores)
        group_query_attention    where K/V heads live then: a `GQA` or its value; default: whole heads if they can be
                                 divided, else copies
        progress                 told (tensors loaded, tensors in all)

        Graphs are compiled at first use, or by ``compile()``, and found in the cache from then on.

        Raises:
            CheckpointError: the folder cannot be used.
            ConfigurationError: an option is out of range, keys and values do not fit into this machine's memory, the
                model's rope scaling has no fixed table of so many positions, or it cannot be divided like that.
            BackendError: the backend cannot work here.
        """
        config = ModelConfig.from_pretrained(path)
        layout = sharding.layout(config, tp_degree, group_query_attention)
        options = decoder_options(
            batch_size=batch_size,
            n_positions=n_positions,
            context_length_estimate=context_length_estimate,
            amp=amp,
            trained=config.max_position_embeddings,
            layout=layout,
        )
        check_positions(config.rope, options.n_positions)
        shard = Shard(config, layout)
        engine = make(backend, layout.degree)
        if not engine.device_state:  # its state stays in this machine's memory
            kv_memory.check_cache(shard, options, kv_memory.machine_bytes())
        weights = load_weights(path, config, options.dtype, progress=progress, shard=shard)
        decoder = SamplingDecoder(config, options, weights, backend=engine)
        engine.attach(decoder, os.fspath(path))
        decoder.folder, decoder.statistics = Path(path), Statistics()
        return decoder
