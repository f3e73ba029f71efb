"""Paceline: decoding with several models at once. Small models set the pace, the big one decides.

from paceline import AutoDecoder, SpeculativeGenerator
"""

from typing import TYPE_CHECKING

from paceline.auto import AutoDecoder
from paceline.auto_drafter import AutoDrafter
from paceline.config import DRAFT_LENGTHS, SpeculativeConfig
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import PacelineError
from paceline.decoder.parallel.sharding import GQA
from paceline.decoder.weights.save_quantized import save_quantized
from paceline.draft.function import FunctionDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.retokenizing import TokenizerPair
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import Chain, DynamicTree, StaticTree
from paceline.engine.request import SamplingParams
from paceline.for_sampling import (
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
from paceline.generator import SpeculativeGenerator
from paceline.medusa.drafter import MedusaDrafter
from paceline.neuron_config import NeuronConfig
from paceline.outputs import GenerationResult, RequestOutput, Statistics
from paceline.text.stop_strings import StopStrings
from paceline.text.structured_output import ReasoningMarkers, StructuredOutput

if TYPE_CHECKING:
    from paceline.application import DecoderApplication
    from paceline.huggingface.adapter import HuggingFaceGenerationAdapter

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


def __getattr__(name: str) -> object:
    """Import what needs `transformers` when it is asked for: that takes as long as half of PyTorch."""
    if name == "HuggingFaceGenerationAdapter":
        from paceline.huggingface.adapter import HuggingFaceGenerationAdapter

        return HuggingFaceGenerationAdapter
    if name == "DecoderApplication":
        from paceline.application import DecoderApplication

        return DecoderApplication
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
