"""The headline property: with one seed, every drafter and option gives the tokens of plain decoding.

Rows and columns are in `tests.equality.matrix`; `tests.equality.pairwise` chooses cases in which any two values meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from paceline import GenerationResult, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from tests.contract.drafters import Depth, Home
from tests.decoder.tiny import Workshop
from tests.equality import matrix
from tests.equality.pairwise import Case, cases, pairs
from tests.sampled import run, texts

NEW = 12
SHARED = [(7 * i) % 80 for i in range(35)]
PROMPTS = [[5, 9, 5, 9, 5], [17], [*SHARED, 4, 4], [*SHARED, 80, 81, 80]]
"""Ragged: one of a single token, and two of several chunks that begin alike."""
CASES = cases(matrix.COLUMNS, matrix.excluded)


def name(case: Case) -> str:
    """The drafter, and every value that is not the first of its column."""
    return ", ".join(v for column, v in case.items() if column == "drafter" or v != matrix.COLUMNS[column][0])


@pytest.fixture(scope="module")
def ranks(two_ranks: None) -> Iterator[list[SamplingDecoder]]:
    """Divided models, which are closed at the end."""
    made = list[SamplingDecoder]()
    yield made
    for one in made:
        one.close()


def loading(case: Case) -> dict[str, Any]:
    """How both models are loaded."""
    found = {**matrix.WEIGHTS[case["weights"]], **matrix.CACHES[case["cache"]], "backend": case["backend"]}
    found |= {"kind": case["family"], "n_positions": matrix.POSITIONS[case["positions"]]}
    if case["slots"] == "1, 2 or 4 slots":
        found["batch_size"] = [1, 2, 4]
    return found | ({"tp_degree": 2} if case["ranks"] == "2 ranks" else {})


def asked(case: Case) -> dict[str, Any]:
    """Arguments of both calls."""
    return {
        **matrix.SAMPLINGS[case["sampling"]],
        **matrix.FEATURES[case["feature"]],
        "tokenizer": matrix.WORDS,
        "max_new_tokens": NEW,
    }


def depth(case: Case) -> Depth:
    depths = [k for k in matrix.row_of(case["drafter"]).depths if k]
    least, most = depths[0], depths[-1]
    return {"least": least, "deepest": most, "several": (0, 1, most)}[case["depth"]]


FIRST: Case = {column: values[0] for column, values in matrix.COLUMNS.items()}
READS = ("family", "weights", "cache", "backend", "sampling", "feature")
"""Columns that plain decoding depends on."""


def plain(workshop: Workshop, case: Case) -> GenerationResult:
    """Plain decoding of the whole model, in one bucket, one token a round."""
    return _plain(workshop, tuple(case[column] for column in READS))


@cache
def _plain(workshop: Workshop, values: tuple[str, ...]) -> GenerationResult:
    case = FIRST | dict(zip(READS, values, strict=True))
    return run(SpeculativeGenerator(None, workshop.decoder(slots=4, **loading(case)), k=0), PROMPTS, **asked(case))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_combination_gives_the_tokens_of_plain_decoding(
    case: Case, workshop: Workshop, tmp_path: Path, ranks: list[SamplingDecoder]
) -> None:
    wanted, row = plain(workshop, case), matrix.row_of(case["drafter"])
    with ExitStack() as stack:
        slots = 1 if case["slots"] == "1 slot" else 4
        home = Home(workshop, tmp_path, stack, slots, loading(case), matrix.ROUNDS[case["round"]], texts(wanted))
        generator = row.make(home, depth(case))
        ranks += [one for one in generator.decoders if one.options.layout.degree > 1]  # type: ignore[misc]
        found = run(generator, PROMPTS, **asked(case))
        assert texts(found) == texts(wanted) and found.finish_reasons == wanted.finish_reasons
        if case["round"] == "prefix caching":
            assert texts(run(generator, PROMPTS, **asked(case))) == texts(wanted)
            assert generator.statistics.prefix_cache_hits
    seen = found.statistics
    if case["feature"] == "tokens" and row.drafts and case["depth"] != "several":
        assert seen.num_draft_tokens
        assert case["drafter"] not in matrix.TOLD or 0 < seen.num_accepted_tokens < seen.num_draft_tokens
    if case["feature"] == "logprobs":
        check_scores(found, wanted)


def check_scores(found: GenerationResult, wanted: GenerationResult) -> None:
    """Log-probabilities and scores are nearly those of plain decoding: a window may be wider."""
    assert found.token_logprobs is not None and wanted.token_logprobs is not None
    for ours, theirs in zip(found.token_logprobs, wanted.token_logprobs, strict=True):
        assert [one.token for one in ours] == [one.token for one in theirs]
        assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-3)
    assert found.logprobs is not None and wanted.logprobs is not None
    for row, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert row == pytest.approx(other, abs=1e-3)


def test_every_allowed_pair_of_values_is_tested() -> None:
    met = {frozenset(two) for case in CASES for two in combinations(case.items(), 2)}
    assert met == set(pairs(matrix.COLUMNS, matrix.excluded))


@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_backends_give_the_same_tokens(workshop: Workshop, family: str) -> None:
    for sampling in ("greedy", "cool", "hot and cut"):
        case = FIRST | {"family": family, "weights": "f32", "sampling": sampling}
        one, other = (plain(workshop, case | {"backend": backend}) for backend in ("eager", "native"))
        assert texts(one) == texts(other)
