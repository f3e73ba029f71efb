"""Paceline: decoding with several models at once. Small models set the pace, the big one decides.

from paceline import AutoDecoder, SpeculativeGenerator
"""

from paceline.auto import AutoDecoder
from paceline.core.acceptance.synthetic import SyntheticAcceptance
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import PacelineError
from paceline.decoder.parallel.sharding import GQA
from paceline.draft.function import lift
from paceline.draft.ngram import NgramDrafter
from paceline.draft.retokenizing import TokenizerPair
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import Chain, DynamicTree, StaticTree
from paceline.engine.draft_length import DRAFT_LENGTHS
from paceline.generator import SpeculativeGenerator
from paceline.medusa.drafter import MedusaDrafter
from paceline.outputs import GenerationResult, RequestOutput, Statistics

__version__ = "0.1.0"

__all__ = [
    "DRAFT_LENGTHS",
    "GQA",
    "AutoDecoder",
    "Chain",
    "DynamicTree",
    "EagleDrafter",
    "GenerationResult",
    "MedusaDrafter",
    "NgramDrafter",
    "PacelineError",
    "RequestOutput",
    "SpeculativeGenerator",
    "StaticTree",
    "Statistics",
    "SyntheticAcceptance",
    "TokenizerPair",
    "Typical",
    "lift",
]
