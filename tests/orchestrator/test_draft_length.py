"""The controller of adaptive depth: it follows the cost model, whatever the machine does."""

from __future__ import annotations

import random

import pytest
import torch

from paceline import DRAFT_LENGTHS
from paceline.core.types import Commit, RoundLimits, RoundReport, RoundResult
from paceline.engine.adaptive import ROUNDS_PER_ALLOTMENT, DraftLengthController, DraftLengthPolicy

TIMES = {k: 1.0 + 0.1 * k for k in DRAFT_LENGTHS}


def told(
    policy: DraftLengthController, *, alpha: float, times: dict[int, float], rounds: int = 400, deepest: int = 99
) -> list[int]:
    """Trace: drafts are accepted with probability alpha, every draft length takes its time. -> draft lengths chosen."""
    dice, chosen = random.Random(0), []
    for _ in range(rounds):
        length = policy.choose(deepest)
        stood = next((i for i in range(length) if dice.random() >= alpha), length)
        policy.record(length, requested=[length], accepted=[stood], seconds=times[length])
        chosen.append(length)
    return chosen


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.6, 1, 1.60), (0.6, 4, 2.31), (0.6, 10, 2.49), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.8, 7, 4.16)],
)
def test_expected_tokens_equal_the_formula(alpha: float, k: int, tokens: float) -> None:
    """E = (1 - alpha^(k+1)) / (1 - alpha)."""
    policy = DraftLengthController((k,))
    told(policy, alpha=alpha, times={k: 1.0}, rounds=3000)
    assert policy.expected(k)[k] == pytest.approx(tokens, rel=0.15)
    for place in range(k):
        policy._history.hits[place], policy._history.tries[place] = alpha * 1e9, 1e9
    assert policy.expected(k)[k] == pytest.approx(tokens, abs=0.006)


@pytest.mark.parametrize(
    ("alpha", "draft", "best"),
    [(0.0, 0.1, 0), (0.9, 0.02, 8), (0.5, 0.3, 1), (0.7, 0.1, 4)],
)
def test_the_controller_settles_on_the_fastest_draft_length(alpha: float, draft: float, best: int) -> None:
    times = {k: 1.0 + k * draft for k in DRAFT_LENGTHS}
    chosen = told(DraftLengthController(DRAFT_LENGTHS), alpha=alpha, times=times)
    assert chosen[200:].count(best) > 0.8 * 200


def test_choices_are_deterministic_and_the_first_time_of_a_length_is_ignored() -> None:
    runs = [told(DraftLengthController(DRAFT_LENGTHS), alpha=0.6, times=TIMES) for _ in range(2)]
    assert runs[0] == runs[1]
    assert sorted(runs[0][: 2 * len(DRAFT_LENGTHS)]) == sorted(2 * DRAFT_LENGTHS), (
        "each is tried twice before any choice"
    )
    policy = DraftLengthController((0, 2))
    policy.record(2, requested=[2], accepted=[2], seconds=100.0)  # compiling
    policy.record(2, requested=[2], accepted=[2], seconds=1.0)
    assert policy.choose(0) == 0 and policy._step_times.at(2) == 1.0


def test_times_of_a_slow_phase_do_not_exclude_a_draft_length() -> None:
    """The only time of the best draft length is twice its real one: its neighbours are tried, which shows it."""
    policy, slow = DraftLengthController(DRAFT_LENGTHS), {**TIMES, 4: 2 * TIMES[4]}
    assert 4 not in told(policy, alpha=0.7, times=slow, rounds=2 * len(DRAFT_LENGTHS))[-2:]
    assert told(policy, alpha=0.7, times=TIMES, rounds=600)[300:].count(4) > 0.8 * 300


def test_draft_lengths_are_compared_at_equal_machine_speed() -> None:
    """The deepest draft length was timed only while the machine was slow: it is chosen once it pays."""
    policy = DraftLengthController(DRAFT_LENGTHS)
    assert told(policy, alpha=0.7, times={k: 2 * one for k, one in TIMES.items()}, rounds=100)[-1] == 4
    assert told(policy, alpha=0.95, times=TIMES, rounds=200)[100:].count(8) > 0.8 * 100


def test_plain_rounds_do_not_seem_slower_the_longer_they_run() -> None:
    """Rounds become slower towards the end of each text, and those of the next start fast."""
    policy, dice, plain = DraftLengthController((0, 1)), random.Random(0), 0
    for number in range(6000):
        length = policy.choose(99)
        seconds = (1.0, 1.8)[length] * (1 + 0.01 * (number % 26)) * (1 + 0.05 * dice.random())
        policy.record(length, requested=[length], accepted=[length and int(dice.random() < 0.58)], seconds=seconds)
        plain += length == 0
    assert plain > 0.97 * 6000


def test_a_draft_is_tried_after_a_long_pause() -> None:
    policy, times = DraftLengthController((0, 1)), {0: 1.0, 1: 2.0}
    chosen = told(policy, alpha=0.0, times=times, rounds=300)
    late = chosen[100:]
    assert 1 in late and late.count(1) < 8
    longer = told(policy, alpha=0.0, times=times, rounds=5000)
    assert 1 in longer and longer.count(1) < 8  # ever more seldom


def test_a_draft_that_becomes_useful_is_used_again() -> None:
    policy, times = DraftLengthController((0, 1)), {0: 1.0, 1: 1.1}
    assert told(policy, alpha=0.0, times=times, rounds=300)[-1] == 0
    assert told(policy, alpha=1.0, times=times, rounds=400)[-100:].count(1) >= 98  # and a visit to what is beside it


def test_short_responses_are_learnt_from() -> None:
    """No round of an answer of four tokens can be as deep as the list of lengths goes."""
    policy, times = DraftLengthController(DRAFT_LENGTHS), {k: 1.0 + k for k in DRAFT_LENGTHS}
    chosen = told(policy, alpha=0.0, times=times, deepest=3)
    assert 8 not in chosen and chosen[100:].count(0) > 0.9 * 300
    assert policy.choose(0) == 0


def test_a_draft_shorter_than_requested_counts_as_rejected() -> None:
    """A draft length that is never reached must not be the only one that is ever taken."""
    policy, chosen = DraftLengthController(DRAFT_LENGTHS), []
    for _ in range(400):
        length = policy.choose(99)
        # It says two, and all stand.
        policy.record(length, requested=[length], accepted=[min(length, 2)], seconds=1.0 + 0.1 * length)
        chosen.append(length)
    assert chosen[200:].count(2) > 0.8 * 200


def test_each_of_several_plain_steps_counts_as_a_round() -> None:
    policy = DraftLengthController((0, 1))
    for _ in range(2):
        policy.record(0, requested=[0, 0], accepted=[4, 0], seconds=5.0)
    assert policy.choose(1) == 1 and policy._step_times.at(0) == 1.0 and policy._rest.idle == 10


def test_every_batch_fill_has_separate_costs_and_no_load_is_slower_than_plain() -> None:
    """Virtual time: a draft costs a tenth of a round of one request, and twice a round of sixteen."""
    controllers, dice = DraftLengthPolicy(DraftLengthController(DRAFT_LENGTHS)), random.Random(0)
    cost = {1: 0.1, 2: 0.3, 5: 1.0, 16: 2.0}
    spent, plain, chosen = 0.0, 0.0, {fill: list[int]() for fill in cost}
    for seated in [*cost, *reversed(cost), *cost] * 4:
        for _ in range(150):
            policy = controllers.at(seated)
            length = policy.choose(99)
            accepted = [next((i for i in range(length) if dice.random() >= 0.6), length) for _ in range(seated)]
            policy.record(length, requested=[length] * seated, accepted=accepted, seconds=1.0 + length * cost[seated])
            spent += 1.0 + length * cost[seated]
            plain += 1.0 + sum(accepted) / seated
            chosen[seated].append(length)
    assert set(controllers._by_fill) == {1, 2, 8, 16}
    for seated in (5, 16):  # whatever was best before: costs are kept, so that nothing is tried anew
        assert chosen[seated].count(0) > 0.95 * len(chosen[seated])
    assert sum(length > 1 for length in chosen[1]) > 0.8 * len(chosen[1])
    assert spent < plain


def virtual(suits: list[float], cost: tuple[float, float, float], *, fixed: int | None = None) -> float:
    """Tokens/s in virtual time, of requests whose drafts stand with these probabilities. ``cost``: of a round,
    of a draft, of a row.
    """
    dice, slots = random.Random(0), len(suits)
    policy, seconds, tokens = DraftLengthPolicy(DraftLengthController(DRAFT_LENGTHS), competes=True), 0.0, 0
    for slot in range(slots):
        policy.begin(slot)
    for number in range(600):
        limits = RoundLimits([DRAFT_LENGTHS[-1] if fixed is None else fixed] * slots, 9, slots)
        length, limits = policy.choose(limits, range(slots)) if fixed is None else (fixed, limits)
        drafted = [min(length, limit) for limit in limits.max_accept]
        stood = [next((i for i in range(d) if dice.random() >= a), d) for a, d in zip(suits, drafted, strict=True)]
        took = (cost[0] + cost[1] * length + cost[2] * (slots + sum(drafted))) * (0.97 + 0.06 * dice.random())
        report = RoundReport([[0] * (1 + one) for one in stood], drafted, took)
        if fixed is None:
            policy.learn(length, RoundResult(Commit(*[torch.empty(0)] * 3), [report]), limits, early=False)
        if number >= 200:
            seconds, tokens = seconds + took, tokens + slots + sum(stood)
    return tokens / seconds


def test_rows_go_to_the_requests_whose_drafts_stand() -> None:
    suits, cost = [0.9, 0.1] * 8, (30.0, 1.0, 0.5)
    best = max(virtual(suits, cost, fixed=length) for length in DRAFT_LENGTHS)
    assert virtual(suits, cost) > 1.15 * best


@pytest.mark.parametrize("suits", [[0.8] * 16, [0.1] * 4, [0.9, 0.1] * 8, [0.95, 0.7, 0.5, 0.2] * 4])
@pytest.mark.parametrize("cost", [(30.0, 1.0, 0.5), (10.0, 1.0, 1.0), (10.0, 8.0, 1.0)])
def test_requests_that_compete_are_never_slower(suits: list[float], cost: tuple[float, float, float]) -> None:
    """Also where good drafts do not pay: a trial ends."""
    best = max(virtual(suits, cost, fixed=length) for length in DRAFT_LENGTHS)
    assert virtual(suits, cost) > 0.97 * best


def test_a_request_in_the_slot_of_another_gets_rows_at_once() -> None:
    """The one before it could accept a single token."""
    policy = DraftLengthPolicy(DraftLengthController((4,)), competes=True)

    def limited(most: list[int]) -> list[int]:
        length, limits = policy.choose(RoundLimits(most, 9, 2), range(2))
        drafted = limits.max_accept
        report = RoundReport([[0] * (1 + one) for one in drafted], drafted, 1.0)
        policy.learn(length, RoundResult(Commit(*[torch.empty(0)] * 3), [report]), limits, early=False)
        return drafted

    for slot in range(2):
        policy.begin(slot)
    for _ in range(ROUNDS_PER_ALLOTMENT + 3):
        limited([4, 4])
    while limited([4, 1]) == [4, 1] and policy._standing[1][1][0][1:]:
        pass
    assert limited([4, 4]) == [4, 1]  # of its last rounds
    policy.begin(1)
    assert limited([4, 4]) == [4, 4]
