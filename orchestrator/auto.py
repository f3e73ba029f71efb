"""`AutoDecoder.from_pretrained`: a checkpoint becomes a decoder that can `sample`.

Below it are the names of transformers-neuronx' classes, for programs written for them: `AutoDecoder`, one family each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.decoder.backends.base import check_formats, make
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels import cache_rows
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import GQA, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.engine.request import InputIds, SamplingParams
from paceline.loadable import Loadable, loadable
from paceline.outputs import GenerationResult, Statistics

if TYPE_CHECKING:
    from paceline.generator import OutputStream, SpeculativeGenerator

_A_THREAD = 1 << 26


class SamplingDecoder(CompiledDecoder):
    """A decoder that decodes plainly by itself, and is a draft or a target of a `SpeculativeGenerator`."""

    _plain: SpeculativeGenerator | None = None

    @property
    def generator(self) -> SpeculativeGenerator:
        """Plain decoding: a generator without a draft."""
        if self._plain is None:
            from paceline.generator import SpeculativeGenerator  # it imports this module

            self._plain = SpeculativeGenerator(None, self, k=0)
        return self._plain

    @property
    def statistics(self) -> Statistics:
        """Of the last call."""
        return self.generator.statistics

    def sample(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        **keywords: Any,
    ) -> Tensor | GenerationResult:
        """As `SpeculativeGenerator.sample`."""
        result: Tensor | GenerationResult = self.generator.sample(input_ids, sequence_length, params, **keywords)
        return result

    def stream(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        **keywords: Any,
    ) -> OutputStream:
        """As `SpeculativeGenerator.stream`."""
        return self.generator.stream(input_ids, sequence_length, params, **keywords)

    def compile(self) -> None:
        """Make every graph that plain decoding needs, so that no call has to wait for one."""
        self.generator.compile()

    def sibling(self) -> SamplingDecoder:
        """As `CompiledDecoder.sibling`."""
        sibling = super().sibling()
        assert isinstance(sibling, SamplingDecoder)
        sibling._plain = None
        return sibling


class AutoDecoder:
    """Finds out from a checkpoint's configuration which family it is."""

    families: ClassVar[tuple[str, ...]] = ()
    """Whose ``model_type`` alone is taken; none: every family's."""

    @classmethod
    def _check_family(cls, found: Loadable) -> None:
        """Raise CheckpointError if this class does not load a checkpoint's family."""
        if cls.families and found.config.model_type not in cls.families:
            raise CheckpointError(
                f"{found.folder} has model_type {found.config.model_type!r}, and {cls.__name__} loads "
                f"{', '.join(cls.families)}; use AutoDecoder, which loads every family"
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        batch_size: int | Sequence[int] = 1,
        n_positions: int | Sequence[int] | None = None,
        context_length_estimate: int | Sequence[int] | None = None,
        amp: str = "bf16",
        backend: str = "native",
        tp_degree: int = 1,
        group_query_attention: GQA | str | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
        modules_to_not_convert: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> SamplingDecoder:
        """Load a decoder.

        path                     folder with config.json and safetensors or .bin weights, whole or sharded; a GGUF file,
                                 or a folder with one and no other weights; the name of a model that was fetched;
                                 or an id of the Hugging Face hub, ``owner/name`` or ``owner/name@revision``
        batch_size               slots; fixed. Where idle ones are computed (all backends but native), rounds of the
                                 first 1, 2, 4, ... slots have graphs of their own; an ascending list says of how many
        n_positions              longest text, or the ascending list of buckets of the cache length; default: what the
                                 model was trained on. A single number gives buckets 128, 256, 512, ... up to it
        context_length_estimate  lengths of the prefill graphs; default 64 and 256
        amp                      "bf16", "f16" or "f32": number format of weights and cache
        backend                  "native" (kernels in C++), "eager", "neuron", "neuron-native", "xla" (to try graphs)
        tp_degree                ranks that divide the model; above 1 on "eager", "neuron", "neuron-native"; see `close`
        group_query_attention    where K/V heads live then: a `GQA` or its value; default: whole heads, else copies
        quantization             of the weight matrices: a `WeightFormat` ("int8", "fp8_e4m3", "q4_1", ...), or "gguf":
                                 those of a GGUF file; default: the format of ``amp``
        kv_cache_dtype           of keys and values: "int8", "fp8_e4m3", "fp8_e5m2"; default: the format of ``amp``
        modules_to_not_convert   left alone by ``quantization``: "lm_head", "embed_tokens" or both; if tied, always both
        progress                 told (tensors loaded, tensors in all)

        Graphs are made at first use, or by ``compile()``. Neuron's are compiled, and found in the cache from then on.

        Raises:
            CheckpointError: the folder or file cannot be used. FetchError: a model of the hub cannot be fetched.
            ConfigurationError: an option is out of range, keys and values do not fit into this machine's memory, the
                model's rope scaling has no fixed table of so many positions, or it cannot be divided like that.
            BackendError: the backend cannot work here.
        """
        found = loadable(
            path,
            batch_size=batch_size,
            n_positions=n_positions,
            context_length_estimate=context_length_estimate,
            amp=amp,
            backend=backend,
            tp_degree=tp_degree,
            group_query_attention=group_query_attention,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            modules_to_not_convert=modules_to_not_convert,
        )
        cls._check_family(found)
        return load(found, progress)


def load(found: Loadable, progress: Callable[[int, int], None] | None = None) -> SamplingDecoder:
    """Load what was found to be loadable; ``progress`` and errors as of `AutoDecoder.from_pretrained`."""
    folder, config, options = found.folder, found.config, found.options
    assert folder is not None, "of a file"
    shard = Shard(config, options.layout)
    engine = make(
        found.backend_name, options.layout.degree, options.quantization, kv_cache_dtype=options.kv_cache_dtype
    )
    if not engine.device_state:  # its state stays in this machine's memory
        cache_rows.check_cache(shard, options, cache_rows.machine_bytes())
    with _few_threads(config):
        weights = load_weights(
            folder,
            config,
            options.dtype,
            progress=progress,
            shard=shard,
            quantization=options.quantization,
            modules_to_not_convert=options.modules_to_not_convert,
        )
        check_formats(found.backend_name, weights.values())
        decoder = SamplingDecoder(config, options, weights, backend=engine)
    engine.attach(decoder.body, os.fspath(folder))
    decoder.folder = folder
    return decoder


@contextmanager
def _few_threads(config: ModelConfig) -> Iterator[None]:
    """Load with a thread for every `_A_THREAD` numbers: those of small tensors wait for each other longer than they
    compute, and an idle one spins.
    """
    usual = torch.get_num_threads()
    numbers = sum(prod(spec.shape) for spec in registry.family(config.model_type).tensors(config).values())
    torch.set_num_threads(min(usual, 1 + numbers // _A_THREAD))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class BloomForSampling(AutoDecoder):
    families = ("bloom",)


class GPT2ForSampling(AutoDecoder):
    families = ("gpt2",)


class GPTJForSampling(AutoDecoder):
    families = ("gptj",)


class GPTNeoXForSampling(AutoDecoder):
    families = ("gpt_neox",)


class Gemma2ForSampling(AutoDecoder):
    families = ("gemma2",)


class Gemma3ForSampling(AutoDecoder):
    families = ("gemma3_text",)


class LlamaForSampling(AutoDecoder):
    families = ("llama",)


class MistralForSampling(AutoDecoder):
    families = ("mistral",)


class MixtralForSampling(AutoDecoder):
    families = ("mixtral",)


class OPTForSampling(AutoDecoder):
    families = ("opt",)


class Phi3ForSampling(AutoDecoder):
    families = ("phi3",)


class Qwen2ForSampling(AutoDecoder):
    families = ("qwen2",)


class Qwen3ForSampling(AutoDecoder):
    families = ("qwen3",)


class Qwen3MoeForSampling(AutoDecoder):
    families = ("qwen3_moe",)
