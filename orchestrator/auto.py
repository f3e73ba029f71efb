"""`AutoDecoder.from_pretrained`: load a checkpoint as a decoder that can `sample`.

It also has the class names of transformers-neuronx, for programs written for them: `AutoDecoder`, one family each.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, cast

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.decoder import environment, memory
from paceline.decoder.backends.base import check_formats, make
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.engine.request import InputIds, SamplingParams
from paceline.loadable import Loadable, loadable
from paceline.outputs import GenerationResult, Statistics

if TYPE_CHECKING:
    from paceline.generator import OutputStream, SpeculativeGenerator

_A_THREAD = 1 << 26

P = ParamSpec("P")
Progress = Callable[[int, int], None]


class FromPretrained(Protocol[P]):
    """`AutoDecoder.from_pretrained` with the keywords of an options type."""

    def __call__(
        self, path: str | os.PathLike[str], progress: Progress | None = None, *args: P.args, **options: P.kwargs
    ) -> SamplingDecoder: ...


def takes(options: Callable[P, object]) -> Callable[[Callable[..., SamplingDecoder]], FromPretrained[P]]:
    """Give a function with ``**options`` the keywords of their type, for type checkers, editors and `help`."""

    def typed(function: Callable[..., SamplingDecoder]) -> FromPretrained[P]:
        own = list(inspect.signature(function).parameters.values())[:-1]
        keywords = inspect.signature(options).parameters.values()
        function.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
        return cast("FromPretrained[P]", function)

    return typed


class SamplingDecoder(CompiledDecoder):
    """A decoder that decodes plainly, and can be a draft or a target of a `SpeculativeGenerator`."""

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
        """Statistics of the last call."""
        return self.generator.statistics

    def sample(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        **keywords: Any,
    ) -> Tensor | GenerationResult:
        """Generate as `SpeculativeGenerator.sample` does."""
        result: Tensor | GenerationResult = self.generator.sample(input_ids, sequence_length, params, **keywords)
        return result

    def stream(
        self,
        input_ids: InputIds,
        sequence_length: int | None = None,
        params: SamplingParams | None = None,
        **keywords: Any,
    ) -> OutputStream:
        """Generate as `SpeculativeGenerator.stream` does."""
        return self.generator.stream(input_ids, sequence_length, params, **keywords)

    def compile(self) -> None:
        """Make every graph that plain decoding needs, so that no call has to wait for one."""
        self.generator.compile()

    def sibling(self) -> SamplingDecoder:
        """Return a decoder as `CompiledDecoder.sibling` does."""
        sibling = super().sibling()
        assert isinstance(sibling, SamplingDecoder)
        sibling._plain = None
        return sibling


class AutoDecoder:
    """Finds out from a checkpoint's configuration which family it is."""

    families: ClassVar[tuple[str, ...]] = ()
    """Restricts loading to this ``model_type``; none: every family."""

    @classmethod
    def _check_family(cls, found: Loadable) -> None:
        """Raise CheckpointError if this class does not load a checkpoint's family."""
        if cls.families and found.config.model_type not in cls.families:
            raise CheckpointError(
                f"{found.folder}: model_type: expected {', '.join(cls.families)} for {cls.__name__}, got "
                f"{found.config.model_type!r}; use AutoDecoder, which loads every family"
            )

    @classmethod
    @takes(LoadOptions)
    def from_pretrained(
        cls, path: str | os.PathLike[str], progress: Progress | None = None, **options: Any
    ) -> SamplingDecoder:
        """Load a decoder.

        path      folder with config.json and safetensors or .bin weights, in one file or sharded; a GGUF file, or a
                  folder with one and no other weights; the name of a fetched model; or an id of the Hugging Face hub,
                  ``owner/name`` or ``owner/name@revision``
        progress  receives (tensors loaded, tensors in all)
        options   the fields of `LoadOptions`: batch_size, n_positions, amp, backend, quantization, ...

        Graphs are made at first use, or by ``compile()``. Neuron's are compiled once, and then loaded from the cache.

        Raises:
            CheckpointError: the folder or file cannot be used. FetchError: a model of the hub cannot be fetched.
            ConfigurationError: an option is unknown or out of range, keys and values do not fit into this machine's
                memory, the model's rope scaling has no fixed table of that size, or it cannot be sharded over that
                number of ranks.
            BackendError: the backend cannot run on this machine.
        """
        found = loadable(path, LoadOptions.of(options))
        cls._check_family(found)
        return load(found, progress)


def load(found: Loadable, progress: Progress | None = None) -> SamplingDecoder:
    """Load what was found to be loadable; ``progress`` and errors as of `AutoDecoder.from_pretrained`."""
    folder, config, options = found.folder, found.config, found.options
    assert folder is not None, "of a file"
    shard = Shard(config, options.layout)
    asked = options.load
    engine = make(asked.backend, asked.tp_degree, asked.quantization, kv_cache_dtype=asked.kv_cache_dtype)
    if not engine.device_state:  # its state stays in this machine's memory
        memory.check_cache(shard, options, memory.machine_bytes())
    with _few_threads(config):
        weights = load_weights(
            folder,
            config,
            options.dtype,
            progress=progress,
            shard=shard,
            quantization=asked.quantization,
            modules_to_not_convert=asked.modules_to_not_convert,
            blocks=BACKENDS[asked.backend].blocks,
        )
        check_formats(asked.backend, weights.values())
        decoder = SamplingDecoder(config, options, weights, backend=engine)
    engine.attach(decoder.body, os.fspath(folder))
    decoder.folder = folder
    return decoder


@contextmanager
def _few_threads(config: ModelConfig) -> Iterator[None]:
    """Load with one thread per `_A_THREAD` numbers: with small tensors, threads wait longer than they compute, and idle
    ones spin. Afterwards `environment.threads` of them compute.
    """
    usual = environment.threads(torch.get_num_threads())
    numbers = sum(prod(spec.shape) for spec in registry.family(config.model_type).tensors(config).values())
    torch.set_num_threads(min(usual, 1 + numbers // _A_THREAD))
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def __getattr__(name: str) -> type[AutoDecoder]:
    """Return the class of one family by its transformers-neuronx name: ``LlamaForSampling``, ``GPT2ForSampling``,
    ...
    """
    if not name.endswith("ForSampling"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _for_sampling(name)


@cache
def _for_sampling(name: str) -> type[AutoDecoder]:
    family = name.removesuffix("ForSampling").lower()
    for model_type in registry.MODEL_FAMILIES:
        if model_type.removesuffix("_text").replace("_", "") == family:
            return type(name, (AutoDecoder,), {"families": (model_type,), "__module__": __name__})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
