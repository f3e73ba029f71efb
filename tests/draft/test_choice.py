"""The drafter that guesses a text best drafts it; what the others would have drafted is compared too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline import FunctionDrafter, SamplingParams, SpeculativeGenerator
from paceline.core.errors import ConfigurationError, SamplingError
from paceline.draft.choice import ChoiceDrafter, ShadowScores
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.eagle.tree import StaticTree
from paceline.engine.engine import ListQueue
from paceline.engine.request import Request
from tests.contract.drafters import BRANCHES
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import drafter as eagle_head
from tests.fakes import Around
from tests.sampled import run, texts

PROMPT, NEW, K = [5, 9, 5, 9, 5], 96, 4


def test_forecasts_are_compared_with_committed_tokens() -> None:
    """Forecasts over several commits, whichever proposal was verified; at the end of a text nothing is counted."""
    scores = ShadowScores(2)
    scores.begin(0)
    scores.forecast(0, 0, [1, 2, 3, 4])
    scores.forecast(0, 1, [9])
    scores.forecast(0, 1, [])
    scores.wrote(0, [1, 2])
    assert [one.num_scored for one in scores.counts] == [0, 1]
    scores.wrote(0, [3, 7])
    assert scores.counts[0].num_scored_tokens == 3 and scores.counts[0].mean_acceptance_length == 4
    assert scores.expected(0, 0) > 1 > scores.expected(0, 1)
    scores.forecast(0, 0, [8])
    scores.end(0)
    scores.wrote(0, [8])
    assert scores.counts[0].num_scored == 1
    scores.begin(1)  # a new text begins with what is known of the others
    assert scores.expected(1, 0) > scores.expected(1, 1) and not scores.known(1, 0)


def test_speed_weighs_tokens_against_time() -> None:
    scores = ShadowScores(2)
    assert scores.speed(0, 0) == scores.speed(0, 1)
    scores.rest_took(1.0)
    scores.took(0, 0.01)
    scores.took(1, 5.0)
    assert scores.speed(0, 0) > scores.speed(0, 1)
    scores.rest_took(1000.0)  # a pause
    assert scores.speed(0, 0) > 0.5


def knows(text: list[int], part: Callable[[int], bool]) -> Callable[[list[int]], list[int]]:
    """Knows how a text continues at some places, and is wrong at the others."""

    def propose(tokens: list[int]) -> list[int]:
        right = text[len(tokens) : len(tokens) + K]
        return right if part(len(tokens)) else [(token + 1) % VOCABULARY for token in right]

    return propose


def rounds(source: object, workshop: Workshop, **asked: Any) -> tuple[int, SpeculativeGenerator]:
    generator = SpeculativeGenerator(source, workshop.decoder(slots=1), k=K)
    assert texts(run(generator, [PROMPT], max_new_tokens=NEW, eos_token_id=[], **asked)) == [plain(workshop)]
    return generator.statistics.num_rounds, generator


def plain(workshop: Workshop) -> list[int]:
    return texts(run(workshop.decoder(slots=1), [PROMPT], max_new_tokens=NEW, eos_token_id=[]))[0]


class Costly(Around):
    """A drafter that is not free to ask: no `TextDrafter`."""

    asked = 0

    def propose(self, *given: Any) -> Any:
        self.asked += 1
        return super().propose(*given)


def test_the_best_drafter_for_the_current_text_drafts(workshop: Workshop) -> None:
    """A text whose halves are known to one drafter each: nearly as few rounds as for one that knows all."""
    text = plain(workshop)
    half = len(PROMPT) + NEW // 2
    first, second = knows(text, lambda at: at < half), knows(text, lambda at: at >= half)
    ideal, _ = rounds(knows(text, lambda _at: True), workshop)
    alone = [rounds(one, workshop)[0] for one in (first, second)]
    for costly in (False, True):
        parts: list[Any] = [FunctionDrafter(one, K) for one in (first, second)]
        if costly:
            parts = [Costly(one) for one in parts]
        chosen, generator = rounds(ChoiceDrafter(parts, ["a", "b"], choose_by="length"), workshop)
        assert ideal <= chosen <= ideal + 14 < min(alone) - 14
        counts = generator.statistics.drafters
        assert all(one.num_drafts and one.num_scored >= one.num_drafts - 1 for one in counts.values())
        drafts = sum(one.num_drafts for one in counts.values())
        assert drafts == generator.statistics.num_drafts
        if costly:  # a drafter that is not the best is left in peace most of the time
            assert all(one.asked < 0.9 * chosen for one in parts)
        values = generator.statistics.to_dict()["drafters"]
        assert isinstance(values, dict) and values["a"]["num_drafts"] == counts["a"].num_drafts


def test_counts_are_complete_with_the_last_output(workshop: Workshop) -> None:
    right = FunctionDrafter(knows(plain(workshop), lambda _at: True), K)
    _, generator = rounds(ChoiceDrafter([right] * 2, ["a", "b"], choose_by="length"), workshop)
    for output in generator.stream([PROMPT], max_new_tokens=NEW):
        statistics = generator.statistics
        assert sum(one.num_drafts for one in statistics.drafters.values()) == statistics.num_drafts
        assert statistics.num_drafts or output.finish_reason is None


def test_a_request_names_the_drafter_that_proposes(workshop: Workshop) -> None:
    """No token depends on the name, also next to requests with another or none, and no other drafter is asked."""
    text = plain(workshop)
    right, wrong = (Costly(FunctionDrafter(one, K)) for one in (knows(text, lambda _: True), lambda _: [1] * K))
    choice = ChoiceDrafter([right, wrong], ["right", "wrong"], choose_by="length")
    slow, _ = rounds(choice, workshop, drafter="wrong")
    assert right.asked == 0 < wrong.asked
    asked = wrong.asked
    fast, generator = rounds(choice, workshop, drafter="right")
    assert wrong.asked == asked and fast < slow / 3
    assert generator.statistics.drafters["wrong"].num_drafts == 0 < generator.statistics.drafters["right"].num_drafts
    both = SpeculativeGenerator(choice, workshop.decoder(slots=2), k=K)
    params = SamplingParams(max_new_tokens=NEW, eos_token_id=[])
    names = ("wrong", "right", None, "right", "wrong")
    requests = [
        replace(Request.batch([PROMPT], replace(params, drafter=name), both.limits)[0], index=index)
        for index, name in enumerate(names)
    ]
    accepted, rows = [0] * len(names), [list[int]() for _ in names]
    for output in both.serve(ListQueue(requests)):
        accepted[output.index] += output.accepted
        rows[output.index] += output.tokens
    assert rows == [text[len(PROMPT) :]] * len(names)
    most = min(accepted[index] for index, name in enumerate(names) if name == "right")
    assert most > 3 * max(accepted[index] for index, name in enumerate(names) if name == "wrong")


def test_a_drafter_that_is_not_there_is_refused(workshop: Workshop) -> None:
    target = workshop.decoder(slots=1)
    choice = SpeculativeGenerator(DraftSpec("choice", parts=parse_draft(["ngram", "suffix"])), target)
    with pytest.raises(SamplingError, match="drafter: expected one of 'ngram', 'suffix', got 'model'; correct"):
        choice.stream([PROMPT], drafter="model")
    with pytest.raises(SamplingError, match="drafter: expected none, since the draft is no choice of several, got 'ng"):
        SpeculativeGenerator("ngram", target).stream([PROMPT], drafter="ngram")


def test_a_choice_uses_the_common_draft_syntax() -> None:
    parts = (DraftSpec("suffix"), DraftSpec(path="a", k=3))
    written = {"type": "choice", "drafts": ["suffix", {"path": "a", "k": 3}], "choose_by": "length"}
    expected = (DraftSpec("choice", parts=parts, options=(("choose_by", "length"),)),)
    assert parse_draft(written) == expected
    assert parse_draft('choice:drafts=["suffix","a:k=3"],choose_by=length') == expected
    assert parse_draft(str(expected[0])) == expected
    for wrong in ("choice", {"type": "choice", "drafts": ["suffix"]}, {"type": "choice", "drafts": "suffix"}):
        with pytest.raises(ConfigurationError, match="drafts: expected at least two drafters for a choice, got"):
            parse_draft(wrong)


def test_drafters_that_cannot_be_combined_in_a_choice_are_rejected(workshop: Workshop, tmp_path: Any) -> None:
    target = workshop.decoder(slots=1)
    tree = eagle_head(tmp_path / "head", target, 3, StaticTree(BRANCHES))
    ngram = FunctionDrafter(lambda _text: [1], 2)
    for given, options, message in (
        ([ngram], {}, "at least two"),
        ([ngram, tree], {}, "drafters of chains"),
        ([ngram, ngram], {"choose_by": "luck"}, "'speed' or 'length'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ChoiceDrafter(given, **options)  # type: ignore[arg-type]
    spec = DraftSpec("choice", parts=parse_draft(["ngram", "suffix"]))
    with pytest.raises(ConfigurationError, match="acceptor='match'"):
        SpeculativeGenerator(spec, target, acceptor="reject")
    with pytest.raises(ConfigurationError, match="'shadow' is not an option"):
        SpeculativeGenerator({"type": "choice", "drafts": ["ngram", "suffix"], "shadow": 1}, target)
