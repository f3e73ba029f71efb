"""Paceline: decoding with several models at once. Small models set the pace, the big one decides.

from paceline import AutoDecoder, SpeculativeGenerator
"""

from paceline.auto import AutoDecoder
from paceline.core.errors import PacelineError
from paceline.core.simulated import Simulated
from paceline.core.typical import Typical
from paceline.decoder.parallel import GQA
from paceline.draft.lift import lift
from paceline.draft.ngram import NgramDrafter
from paceline.draft.reencoding import Reencoding
from paceline.eagle.drafter import EagleDrafter
from paceline.eagle.growth import Chain, DynamicTree, StaticTree
from paceline.generator import SpeculativeGenerator
from paceline.medusa.drafter import MedusaDrafter
from paceline.pace import LADDER
from paceline.result import Event, GenerationResult, Statistics

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
