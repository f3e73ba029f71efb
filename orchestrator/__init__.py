"""Paceline: decoding with several models at once. Small models set the pace, the big one decides.

from paceline import AutoDecoder, SpeculativeGenerator

Every name below is imported when it is first used, so that a command that is rejected, or a process that decodes
nothing, does not load PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.application import DecoderApplication
    from paceline.auto import (
        AutoDecoder,
        BloomForSampling,
        Gemma2ForSampling,
        Gemma3ForSampling,
        GPT2ForSampling,
        GPTJForSampling,
        GPTNeoXForSampling,
        LlamaForSampling,
        MistralForSampling,
        MixtralForSampling,
        OPTForSampling,
        Phi3ForSampling,
        Qwen2ForSampling,
        Qwen3ForSampling,
        Qwen3MoeForSampling,
    )
    from paceline.auto_drafter import AutoDrafter
    from paceline.config import DRAFT_LENGTHS, SpeculativeConfig
    from paceline.core.acceptance.synthetic import SyntheticAcceptance
    from paceline.core.acceptance.typical import Typical
    from paceline.core.errors import PacelineError
    from paceline.decoder.options import LoadOptions
    from paceline.decoder.parallel.sharding import GQA
    from paceline.decoder.weights.save_quantized import save_quantized
    from paceline.draft.base import FunctionDrafter
    from paceline.draft.ngram import NgramDrafter
    from paceline.draft.retokenizing import TokenizerPair
    from paceline.eagle.drafter import EagleDrafter
    from paceline.eagle.tree import Chain, DynamicTree, StaticTree
    from paceline.engine.request import SamplingParams
    from paceline.generator import SpeculativeGenerator
    from paceline.huggingface.adapter import HuggingFaceGenerationAdapter
    from paceline.medusa.drafter import MedusaDrafter
    from paceline.neuron_config import NeuronConfig
    from paceline.outputs import GenerationResult, RequestOutput, Statistics
    from paceline.text.stop_strings import StopStrings
    from paceline.text.structured_output import ReasoningMarkers, StructuredOutput

__version__ = "0.1.0"

__all__ = [
    "DRAFT_LENGTHS",
    "GQA",
    "AutoDecoder",
    "AutoDrafter",
    "BloomForSampling",
    "Chain",
    "DecoderApplication",
    "DynamicTree",
    "EagleDrafter",
    "FunctionDrafter",
    "GPT2ForSampling",
    "GPTJForSampling",
    "GPTNeoXForSampling",
    "Gemma2ForSampling",
    "Gemma3ForSampling",
    "GenerationResult",
    "HuggingFaceGenerationAdapter",
    "LlamaForSampling",
    "LoadOptions",
    "MedusaDrafter",
    "MistralForSampling",
    "MixtralForSampling",
    "NeuronConfig",
    "NgramDrafter",
    "OPTForSampling",
    "PacelineError",
    "Phi3ForSampling",
    "Qwen2ForSampling",
    "Qwen3ForSampling",
    "Qwen3MoeForSampling",
    "ReasoningMarkers",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "SpeculativeGenerator",
    "StaticTree",
    "Statistics",
    "StopStrings",
    "StructuredOutput",
    "SyntheticAcceptance",
    "TokenizerPair",
    "Typical",
    "save_quantized",
]

_MODULE_OF = {
    name: module
    for module, names in {
        "application": "DecoderApplication",
        "auto": "AutoDecoder BloomForSampling Gemma2ForSampling Gemma3ForSampling GPT2ForSampling "
        "GPTJForSampling GPTNeoXForSampling LlamaForSampling MistralForSampling MixtralForSampling OPTForSampling "
        "Phi3ForSampling Qwen2ForSampling Qwen3ForSampling Qwen3MoeForSampling",
        "auto_drafter": "AutoDrafter",
        "config": "DRAFT_LENGTHS SpeculativeConfig",
        "core.acceptance.synthetic": "SyntheticAcceptance",
        "core.acceptance.typical": "Typical",
        "core.errors": "PacelineError",
        "decoder.options": "LoadOptions",
        "decoder.parallel.sharding": "GQA",
        "decoder.weights.save_quantized": "save_quantized",
        "draft.base": "FunctionDrafter",
        "draft.ngram": "NgramDrafter",
        "draft.retokenizing": "TokenizerPair",
        "eagle.drafter": "EagleDrafter",
        "eagle.tree": "Chain DynamicTree StaticTree",
        "engine.request": "SamplingParams",
        "generator": "SpeculativeGenerator",
        "huggingface.adapter": "HuggingFaceGenerationAdapter",
        "medusa.drafter": "MedusaDrafter",
        "neuron_config": "NeuronConfig",
        "outputs": "GenerationResult RequestOutput Statistics",
        "text.stop_strings": "StopStrings",
        "text.structured_output": "ReasoningMarkers StructuredOutput",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
