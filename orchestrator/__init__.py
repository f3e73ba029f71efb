"""Paceline: decoding with several models at once. Small models set the pace, the big one decides.

from paceline import AutoDecoder, SpeculativeGenerator
"""

from paceline.auto import AutoDecoder
from paceline.core.acceptance.synthetic import Simulated
from paceline.core.acceptance.typical import Typical
from paceline.core.errors import PacelineError
from paceline.decoder.parallel.sharding import GQA
from paceline.draft.function import lift
from paceline.draft.ngram import NgramDrafter
from paceline.draft.retokenizing import Reencoding
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.tree import Chain, DynamicTree, StaticTree
from paceline.engine.draft_length import LADDER
from paceline.generator import SpeculativeGenerator
from paceline.medusa.drafter import MedusaDrafter
from paceline.outputs import Event, GenerationResult, Statistics

__version__ = "0.1.0"

__all__ = [
    "GQA",
    "LADDER",
    "AutoDecoder",
    "Chain",
    "DynamicTree",
    "EagleDrafter",
    "Event",
    "GenerationResult",
    "MedusaDrafter",
    "NgramDrafter",
    "PacelineError",
    "Reencoding",
    "Simulated",
    "SpeculativeGenerator",
    "StaticTree",
    "Statistics",
    "Typical",
    "lift",
]
