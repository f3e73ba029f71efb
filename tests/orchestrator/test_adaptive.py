"""Depth chosen anew every round: the choice follows the cost model, and never changes a token."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest
import torch

from paceline import LADDER, SpeculativeGenerator
from paceline.build import Demands
from paceline.core.errors import ConfigurationError, SamplingError
from paceline.loop import Engine
from paceline.pace import Pace, of
from tests.decoder.tiny import Workshop
from tests.fakes import Checked, TableDecoder, near, table

V = 12
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.6)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8]]


def told(
    pace: Pace, *, alpha: float, times: dict[int, float], rounds: int = 400, seed: int = 0, deepest: int = 99
) -> list[int]:
    """A trace: every draft stands with probability alpha, every rung takes its time. -> rungs chosen."""
    dice = random.Random(seed)
    chosen = []
    for _ in range(rounds):
        rung = pace.choose(deepest)
        stood = next((i for i in range(rung) if dice.random() >= alpha), rung)
        pace.record(rung, asked=[rung], accepted=[stood], seconds=times[rung])
        chosen.append(rung)
    return chosen


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.6, 1, 1.60), (0.6, 4, 2.31), (0.6, 10, 2.49), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.8, 7, 4.16)],
)
def test_tokens_expected_are_those_of_the_formula(alpha: float, k: int, tokens: float) -> None:
    """E = (1 - alpha^(k+1)) / (1 - alpha)."""
    pace = Pace((k,))
    told(pace, alpha=alpha, times={k: 1.0}, rounds=3000)
    assert pace.tokens(k) == pytest.approx(tokens, rel=0.15)
    for place in range(k):
        pace._hits[place], pace._tries[place] = alpha * 1e9, 1e9
    assert pace.tokens(k) == pytest.approx(tokens, abs=0.006)


@pytest.mark.parametrize(
    ("alpha", "draft", "best"),
    [(0.0, 0.1, 0), (0.9, 0.02, 8), (0.5, 0.3, 1), (0.7, 0.1, 4)],
)
def test_it_settles_on_the_rung_with_the_most_tokens_per_second(alpha: float, draft: float, best: int) -> None:
    times = {k: 1.0 + k * draft for k in LADDER}
    chosen = told(Pace(LADDER), alpha=alpha, times=times)
    late = chosen[len(chosen) // 2 :]
    assert sum(rung == best for rung in late) > 0.8 * len(late)


def test_the_same_trace_gives_the_same_choices_and_the_first_time_of_a_rung_does_not_count() -> None:
    times = {k: 1.0 + k * 0.1 for k in LADDER}
    runs = [told(Pace(LADDER), alpha=0.6, times=times, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert sorted(runs[0][: 2 * len(LADDER)]) == sorted([*LADDER, *LADDER])  # each is tried twice before any choice
    pace = Pace((0, 2))
    pace.record(2, asked=[2], accepted=[2], seconds=100.0)  # compiling
    pace.record(2, asked=[2], accepted=[2], seconds=1.0)
    assert pace.rate(2) == pace.tokens(2)


def test_after_long_without_drafts_one_is_tried() -> None:
    pace, times = Pace((0, 1)), {0: 1.0, 1: 2.0}
    chosen = told(pace, alpha=0.0, times=times, rounds=300)
    late = chosen[100:]
    assert 1 in late and late.count(1) < 8
    longer = told(pace, alpha=0.0, times=times, rounds=5000)
    assert 1 in longer and longer.count(1) < 8  # ever more seldom


def test_a_draft_that_becomes_useful_is_taken_up_again() -> None:
    pace, times = Pace((0, 1)), {0: 1.0, 1: 1.1}
    assert told(pace, alpha=0.0, times=times, rounds=300)[-1] == 0
    assert told(pace, alpha=1.0, times=times, rounds=400)[-100:] == [1] * 100


def test_short_answers_are_learnt_from_as_well() -> None:
    """No round of an answer of four tokens can be as deep as the ladder goes."""
    pace, times = Pace(LADDER), {k: 1.0 + k for k in LADDER}
    chosen = told(pace, alpha=0.0, times=times, deepest=3)
    assert 8 not in chosen and chosen[100:].count(0) > 0.9 * 300
    assert pace.choose(0) == 0


class Told(Pace):
    """Rungs as they are given; keeps what it is told."""

    def choose(self, deepest: int) -> int:
        return self.plan.pop(0)

    def record(self, rung: int, *, asked: list[int], accepted: list[int], seconds: float | None) -> None:
        self.heard.append((rung, seconds is not None))


def test_the_time_of_reading_what_a_rest_has_left_is_no_rungs() -> None:
    pace = Told((0, 2))
    pace.plan, pace.heard = [2, 2, 0, 0, 2, 2, 0, 2], []

    class Shown(Checked):
        def _engine(self, demands: Demands) -> Engine:
            self._plan = replace(self._plan, pace=pace)
            return super()._engine(demands)

    maker = Shown(TableDecoder(DRAFT), TableDecoder(TARGET), k=(0, 2))
    stream = maker.stream([[1, 2, 3]], max_new_tokens=60)
    while pace.plan:
        next(stream)
    stream.close()
    timed = [rung == 0 or late for rung, late in pace.heard]
    assert timed[:8] == [True, True, True, True, False, True, True, False]


def test_a_draft_that_stops_short_of_its_rung_counts_as_one_that_does_not_stand() -> None:
    """A rung that is never reached must not be the only one that is ever taken."""
    pace, chosen = Pace(LADDER), []
    for _ in range(400):
        rung = pace.choose(99)
        pace.record(rung, asked=[rung], accepted=[min(rung, 2)], seconds=1.0 + 0.1 * rung)  # it says two, all stand
        chosen.append(rung)
    assert chosen[200:].count(2) > 0.8 * 200


@pytest.mark.parametrize("fused", [None, False])
def test_every_rung_is_tried_with_a_draft_that_has_little_to_say(fused: bool | None) -> None:
    maker = Checked(TableDecoder(DRAFT), TableDecoder(TARGET), k=LADDER, confidence=0.9, fused=fused)
    maker.sample([[1, 2, 3]], max_new_tokens=40)
    assert set(maker.statistics.rungs) == set(LADDER)


@pytest.mark.parametrize("k", [(), (2, 1), (0, 0, 1), (-1, 2)])
def test_a_ladder_has_to_ascend(k: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="ascending"):
        of(k)


class Dice(Pace):
    """Any rung at any time."""

    def choose(self, deepest: int) -> int:
        return random.Random(sum(self._runs.values())).choice(self.ladder)


class Random(Checked):
    """Rungs at random, over caches that check themselves."""

    def _engine(self, demands: Demands) -> Engine:
        self._plan = replace(self._plan, pace=Dice(LADDER))
        return super()._engine(demands)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("heat", [{}, {"do_sample": True, "seed": 4}])
@pytest.mark.parametrize(("acceptor", "exact"), [("match", True), ("match", False), ("reject", True)])
def test_rungs_at_random_leave_no_gap_and_change_no_token(
    acceptor: str, exact: bool, heat: dict, fused: bool | None
) -> None:
    """Not exact: depth 0 takes several plain steps in one graph."""
    own = {"slots": 2, "reaches": (32, 64)}
    plain = TableDecoder(TARGET, **own).sample(PROMPTS, max_new_tokens=40, **heat)
    how = {"k": LADDER, "acceptor": acceptor, "exact": exact, "fused": fused}
    maker = Random(TableDecoder(DRAFT, **own), TableDecoder(TARGET, **own), **how)
    made = maker.sample(PROMPTS, max_new_tokens=40, return_dict=True, **heat)
    if acceptor == "match" or not heat:
        assert torch.equal(made.sequences, plain)
    assert set(made.statistics.rungs) == set(LADDER)
    itself = Random(TableDecoder(TARGET, **own), TableDecoder(TARGET, **own), **how)
    done = itself.sample(PROMPTS, max_new_tokens=40, return_dict=True, **heat)
    assert done.statistics.accepted == done.statistics.drafted > 0


def test_compiled_models_on_a_ladder(workshop: Workshop) -> None:
    draft, target = workshop.pair(backend="inductor", amp="bf16")
    ladder = (0, 4)  # its graphs are those of the tests of formats
    plain = target.sample(PROMPTS, max_new_tokens=40)
    made = SpeculativeGenerator(draft, target, k=ladder).sample(PROMPTS, max_new_tokens=40, return_dict=True)
    assert torch.equal(made.sequences, plain)
    assert set(made.statistics.rungs) <= set(ladder)


@pytest.mark.parametrize("heat", [{}, {"do_sample": True, "seed": 4, "top_p": 0.9}])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_several_plain_steps_in_one_graph_are_plain_decoding(k: int, heat: dict) -> None:
    own = {"slots": 2, "reaches": (32, 64)}
    call = {"max_new_tokens": 45, "eos_token_id": [3], "pad_token_id": 0, **heat}
    plain = TableDecoder(TARGET, **own).sample(PROMPTS, **call)
    maker = Checked(None, TableDecoder(TARGET, **own), k=k)
    assert torch.equal(maker.sample(PROMPTS, **call), plain)
    done = maker.statistics
    assert (done.drafted, done.accepted, done.tau) == (0, 0, 1.0)
    assert done.rounds >= done.new_tokens - len(PROMPTS)  # steps; some ran past an end
    assert max(len(event.tokens) for event in maker.stream(PROMPTS, max_new_tokens=45)) == k + 1


class Rests(Pace):
    """Never drafts."""

    def choose(self, deepest: int) -> int:
        return 0


def test_a_rest_takes_several_plain_steps_at_once_unless_a_text_has_no_room_for_them() -> None:
    own = {"slots": 2, "reaches": (32, 64)}
    plain = TableDecoder(TARGET, **own).sample(PROMPTS, max_new_tokens=41)

    class Resting(Checked):
        def _engine(self, demands: Demands) -> Engine:
            self._plan = replace(self._plan, pace=Rests(LADDER))
            return super()._engine(demands)

    maker = Resting(TableDecoder(DRAFT, **own), TableDecoder(TARGET, **own), k=LADDER, exact=False)
    assert torch.equal(maker.sample(PROMPTS, max_new_tokens=41), plain)
    done = maker.statistics
    assert (done.drafted, done.tau) == (0, 1.0) and len(done.rungs) < 41
    events = list(maker.stream(PROMPTS, max_new_tokens=41))
    assert max(len(event.tokens) for event in events) == 5
    # Who does without drafts has no limit to tell how much is wanted: one token a round, for all.
    events = list(maker.stream(PROMPTS[:2], max_new_tokens=41, speculate=[True, False]))
    assert max(len(event.tokens) for event in events) == 1


def test_each_of_several_plain_steps_is_a_round_to_the_pace() -> None:
    pace = Pace((0, 1))
    for _ in range(2):
        pace.record(0, asked=[0, 0], accepted=[4, 0], seconds=5.0)
    assert pace.rate(0) == 1.0 and pace._idle == 10


def test_a_request_may_do_without_drafts() -> None:
    maker = Checked(TableDecoder(DRAFT, slots=2), TableDecoder(TARGET, slots=2), k=3)
    plain = TableDecoder(TARGET, slots=2).sample(PROMPTS, max_new_tokens=30)
    assert torch.equal(maker.sample(PROMPTS, max_new_tokens=30, speculate=[True, False, True, False]), plain)
    some = maker.statistics.drafted
    assert torch.equal(maker.sample(PROMPTS, max_new_tokens=30, speculate=False), plain)
    assert maker.statistics.drafted == 0 < some
    with pytest.raises(SamplingError, match="2 entries for 4 prompts"):
        maker.sample(PROMPTS, max_new_tokens=30, speculate=[True, False])


def test_why_a_round_is_in_two_graphs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Draft and target share a graph by themselves; a processor on the host keeps them apart."""
    maker = Checked(TableDecoder(DRAFT), TableDecoder(TARGET), k=3)
    for asked, said in (({}, False), ({"repetition_penalty": 1.2}, True), ({"output_scores": True}, True)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="paceline"):
            maker.sample([[1, 2]], max_new_tokens=4, **asked)
        assert ("need the host at every token" in caplog.text) is said


@pytest.mark.parametrize("fused", [None, False])
def test_a_draft_in_doubt_stops(fused: bool | None) -> None:
    plain = TableDecoder(TARGET, slots=2).sample(PROMPTS, max_new_tokens=30)
    drafted, rates = [], []
    for confidence in (0.0, 0.5, 0.9, 1.0):
        draft, target = TableDecoder(DRAFT, slots=2), TableDecoder(TARGET, slots=2)
        maker = Checked(draft, target, k=4, confidence=confidence, fused=fused)
        assert torch.equal(maker.sample(PROMPTS, max_new_tokens=30), plain)
        drafted.append(maker.statistics.drafted)
        rates.append(maker.statistics.acceptance_rate)
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[2] and drafted[3] == 0
    assert rates[2] > rates[0]
    with pytest.raises(ConfigurationError, match="no probability"):
        SpeculativeGenerator(TableDecoder(DRAFT), TableDecoder(TARGET), confidence=2)
