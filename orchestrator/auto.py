"""`AutoDecoder.from_pretrained`: load a checkpoint as a decoder that can `sample`.

It also has the class names of transformers-neuronx, for programs written for them: `AutoDecoder`, one family each.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, ClassVar, ParamSpec, Protocol, cast

from torch import Tensor

from paceline import build
from paceline.build import Progress
from paceline.core.errors import CheckpointError
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.models import registry
from paceline.decoder.options import LoadOptions, renamed
from paceline.engine.request import InputIds, SamplingParams
from paceline.generator import OutputStream, SpeculativeGenerator
from paceline.loadable import Loadable, loadable
from paceline.outputs import GenerationResult, Statistics

P = ParamSpec("P")


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
    """A decoder for plain decoding, which can be a draft or a target of a `SpeculativeGenerator`."""

    @cached_property
    def generator(self) -> SpeculativeGenerator:
        """Plain decoding: a generator without a draft."""
        return SpeculativeGenerator(None, self, k=0)

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
        sibling = super().sibling()
        assert isinstance(sibling, SamplingDecoder)
        sibling.__dict__.pop("generator", None)
        return sibling


Sampler = SpeculativeGenerator | SamplingDecoder
"""Continues prompts."""


class AutoDecoder:
    """Finds out from a checkpoint's configuration which family it is."""

    families: ClassVar[tuple[str, ...]] = ()
    """Restricts loading to this ``model_type``; none: every family."""

    @classmethod
    def _check_family(cls, found: Loadable) -> None:
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
        with renamed(options) as own:
            found = loadable(path, LoadOptions.of(own))
        cls._check_family(found)
        return load(found, progress)


def load(found: Loadable, progress: Progress | None = None) -> SamplingDecoder:
    """Load what was found to be loadable; ``progress`` and errors as of `AutoDecoder.from_pretrained`."""
    return build.load(found, progress, kind=SamplingDecoder)


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
