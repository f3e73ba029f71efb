"""Rows and columns of the equality matrix: a row for each drafter, a column for each thing that must change no
token.

A new drafter is a line in `tests.contract.drafters.ROWS`, a new value one line below. Which values meet in a case is
chosen by `tests.equality.pairwise`. Contains no tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.types import FeatureSpec
from paceline.registry import DRAFTERS
from paceline.text.structured_output import StructuredOutput
from tests.contract.drafters import ROWS, Row, tokenizers
from tests.equality.settings import SETTINGS, stumbling
from tests.orchestrator.test_trees import Orchard

TOLD: dict[str, Row] = {
    "told, wrong now and then": Row("function", lambda home, k: home.generator(stumbling(home.known), k)),
    "told static tree": Row(
        "medusa", lambda home, _k: home.generator(Orchard(home.known, grown=False, reads=FeatureSpec())), depths=(4,)
    ),
    "told dynamic tree": Row(
        "medusa",
        lambda home, _k: home.generator(Orchard(home.known, grown=True, reads=FeatureSpec((0, 2)))),
        depths=(4,),
    ),
}
"""Drafters that know the text and err now and then, so that much is accepted and much is rolled back."""

WEIGHTS: dict[str, dict[str, str]] = {
    **{amp: {"amp": amp} for amp in ("f32", "bf16", "f16")},
    **{form: {"amp": "f32", "quantization": form} for form in ("int8", "fp8_e4m3", "q4_1")},
}
"""A format for each kind of product; `test_quantized.py` has the bits of all formats."""
CACHES: dict[str, dict[str, str]] = {
    "cache as amp": {},
    **{f"cache {form}": {"kv_cache_dtype": form} for form in ("int8", "fp8_e4m3")},
}
FAMILIES = ("blocks", "gpt2", "bloom", "qwen3 slides", "qwen3 moe", "gemma3")
"""Each asks its kernels for something that the others do not: learned positions, slopes, sliding layers beside full
ones, experts, capped logits. All families are compared with transformers in `test_families.py`.
"""
WHOLE_BLOCKS = ("blocks", "gpt2", "bloom")
"""Families whose matrices have rows of whole blocks."""

SAMPLINGS: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "wide": {"do_sample": True, "temperature": 0.9, "top_k": 300, "seed": 5},
}
SLOTS: dict[str, Any] = {"4 slots": 4, "1 slot": 1, "1, 2 or 4 slots": [1, 2, 4]}
POSITIONS = {"96 positions": [96], "24, 48 or 96 positions": [24, 48, 96]}
ROUNDS: dict[str, dict[str, Any]] = {
    "any round": {},
    "two graphs": {"fused": False},
    "any width": {"exact": False},
    "reject": {"acceptor": "reject"},
    "prefix caching": {"prefix_caching": True},
}
WORDS = tokenizers().target
FEATURES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "penalties": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "presence_penalty": 0.7, "frequency_penalty": 0.4,
        "logit_bias": {3: 1.5, 5: -100.0}, "eos_token_id": list(range(0, 96, 11)), "min_tokens": 3,
    },
    "logprobs": {"logprobs": 3, "output_scores": True},
    "schema": {"structured_outputs": StructuredOutput("regex", "(the|cat| ){3,20}"), "eos_token_id": [0]},
    "ends": {  # decided behind a round: nothing in it is processed on the host
        "eos_token_id": list(range(1, 96, 4)),
        "stop_strings": ["e"],
        "sequence_length": 39,  # two tokens behind one of the prompts, and one behind another
    },
    "two outputs, half without drafts": {"n": 2, "use_speculation": [True, False, True, False]},
}  # fmt: skip
COLUMNS: dict[str, tuple[str, ...]] = {
    "drafter": (*ROWS, *TOLD),
    "ranks": ("1 rank", "2 ranks"),
    "family": FAMILIES,
    "weights": tuple(WEIGHTS),
    "feature": tuple(FEATURES),
    "round": tuple(ROUNDS),
    "cache": tuple(CACHES),
    "sampling": tuple(SAMPLINGS),
    "slots": tuple(SLOTS),
    "depth": ("deepest", "least", "several"),
    "positions": tuple(POSITIONS),
    "backend": ("native", "eager"),
}


def row_of(name: str) -> Row:
    return {**ROWS, **TOLD}[name]


def excluded(two: Mapping[str, str]) -> bool:
    """Whether two values of two columns have no meaning together, or no promise."""
    if "drafter" in two and (row := row_of(two["drafter"])):
        alone, tree = row.of == "none", DRAFTERS[row.of].trees and len(row.depths) == 1
        if two.get("ranks") == "2 ranks" and row.of == "gemma4_assistant":  # which refuses a sharded target
            return True
        if two.get("ranks") == "2 ranks":  # who drafts in no graph of the target does there what he does elsewhere
            return not DRAFTERS[row.of].fused and two["drafter"] not in ("none", "ngram")
        if two.get("depth") == "several":
            return not row.adaptive_k
        if two.get("depth") == "least":
            return len(row.depths) == 1
        if two.get("round") == "two graphs":
            return alone
        if two.get("round") == "reject":  # a rule for chains of one drafter
            return alone or tree or row.of in ("fallback", "choice", "remote")
    if two.get("round") == "reject" and "sampling" in two:
        return two["sampling"] != "greedy"  # it keeps the law, and not the tokens
    if two.get("weights", "").startswith("q") and "family" in two:
        return two["family"] not in WHOLE_BLOCKS
    if "weights" in two and (two.get("backend") == "eager" or two.get("slots") == "1, 2 or 4 slots"):
        return two["weights"] in ("bf16", "f16")  # only rounds of one width agree on eager: test_equality.py
    if two.get("slots") == "1, 2 or 4 slots" and "backend" in two:
        return two["backend"] == "native"  # which skips empty slots in one graph
    if two.get("ranks") == "2 ranks":  # partial sums are rounded otherwise, so that near-ties of few bits differ
        first = {"backend": "eager", "weights": "f32", "cache": "cache as amp"}
        return any(two[column] != value for column, value in first.items() if column in two)
    return False
