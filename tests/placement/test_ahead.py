"""Draft-ahead without a process: what is ready and what is dropped, for drafters that are right or wrong."""

from __future__ import annotations

import itertools
import math
import random
from itertools import zip_longest

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core import probs
from paceline.core.drafter_statistics import DrafterHealth
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits, SamplingTensors
from paceline.decoder import steps
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.placement.lookahead import DraftedSlot, IdleBudget, LookaheadDrafter, OutcomeModel
from paceline.workers.draft import SecondChoices
from tests.decoder.tiny import POSITIONS, VOCABULARY, Workshop
from tests.fakes import Checked, TableDecoder
from tests.placement.faulty import DRAFT, TARGET, drafter, working_ahead

PROMPT = [3, 1, 4, 1, 5]
SAMPLED = {"do_sample": True, "temperature": 1.2, "seed": 3}
K = 4


@pytest.mark.parametrize(("kind", "least", "most"), [("itself", 1.0, 1.0), ("never", 0.0, 0.0), ("often", 0.01, 0.9)])
def test_prepared_drafts_are_used_exactly_if_all_predictions_were_right(kind: str, least: float, most: float) -> None:
    """The target as its own draft is always right; one that takes the least likely token never is."""
    logits: torch.Tensor = {"itself": TARGET, "never": -TARGET, "often": DRAFT}[kind]
    ahead = LookaheadDrafter(drafter(1, 3, logits))
    generator = Checked(ahead, TableDecoder(TARGET))
    hits, found = [], list(PROMPT)
    for event in generator.stream([PROMPT], max_new_tokens=45):
        found += event.tokens
        hits.append(ahead.hit)
        ahead.work()
    expected = SpeculativeGenerator(None, TableDecoder(TARGET)).sample([PROMPT], max_new_tokens=45)
    assert [found] == expected.tolist()  # type: ignore[union-attr]
    later = hits[2:-1]  # nothing can be ready for the prompt and the first round; the last may be cut short
    assert len(later) > 8 and least <= sum(later) / len(later) <= most


@pytest.mark.parametrize(("slots", "asked"), [(1, {}), (3, SAMPLED)], ids=["greedy", "sampled"])
def test_more_idle_time_prepares_more_drafts(slots: int, asked: dict) -> None:
    """Whatever was read in advance: the caches, which check themselves, hold the text, and tokens are the same."""
    prompts = [PROMPT, [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3]]
    asked = {"max_new_tokens": 25, **asked}
    wanted = SpeculativeGenerator(None, TableDecoder(TARGET)).sample(prompts, return_dict=True, **asked)
    hits = []
    for units in (1, 3, 20):
        ahead = working_ahead(slots, 3)
        generator, found, hit = Checked(ahead, TableDecoder(TARGET, slots=slots)), [list(p) for p in prompts], 0
        for event in generator.stream(prompts, **asked):
            found[event.index] += event.tokens
            hit += ahead.hit
            for _ in range(units):
                ahead.work()
        assert found == [row[:size].tolist() for row, size in zip(wanted.sequences, wanted.lengths, strict=True)]
        hits.append(hit)
    assert hits[0] < hits[1] < hits[2]


class Texts:
    """Random commits for a plain drafter and one that works ahead, both over the same model."""

    def __init__(self, workshop: Workshop, slots: int, dice: random.Random) -> None:
        vocabulary = VocabMap(VOCABULARY, VOCABULARY)
        here, there = (workshop.decoder("draft", slots=slots).sibling() for _ in range(2))
        self.plain = ModelDrafter(here, K, vocabulary=vocabulary)
        self.ahead = LookaheadDrafter(
            ModelDrafter(there, K + 1, vocabulary=vocabulary), SecondChoices(there, vocabulary)
        )
        self._slots, self._dice = slots, dice
        self.ends = [0] * slots  # positions; 0 = nobody is there
        self.hits = self.early = 0

    def seat(self) -> list[list[int]]:
        """Requests come where a text is done, and sometimes go. -> the first tokens of those who came"""
        found: list[list[int]] = [[] for _ in self.ends]
        for slot, end in enumerate(self.ends):
            if end + 2 * (K + 1) > POSITIONS or (end == 0 and self._dice.random() < 0.5):
                prompt = [self._dice.randrange(VOCABULARY) for _ in range(self._dice.randrange(1, 30))]
                for one in (self.plain, self.ahead):
                    one.add_request(slot, prompt)
                self.ends[slot], found[slot] = len(prompt), [self._dice.randrange(VOCABULARY)]
            elif end and self._dice.random() < 0.02:
                self.ends[slot] = 0
                for one in (self.plain, self.ahead):
                    one.finish_request(slot)
        return found

    def committed(self) -> list[list[int]]:
        """Possible responses of the target: often what was expected, or else something like it in every slot."""
        last = self.ahead._last
        if last is None:
            return [[self._dice.randrange(VOCABULARY)] for _ in self.ends]
        if last.ready and self._dice.random() < 0.5:
            guess = self._dice.choice(last.ready)
            self.early += guess is not last.ready[-1]
            return [[0] if text is None else text[1] for text in guess.texts]
        return [self._one(row, chain) for row, chain in zip_longest(last.tokens.tolist(), last.slots)]

    def _one(self, drafts: list[int], chain: DraftedSlot | None) -> list[int]:
        """All drafts; or some, and a second choice or any token."""
        if self._dice.random() < 0.6:
            return drafts
        place = self._dice.randrange(K + 1)
        if chain is None or chain.seconds is None or self._dice.random() < 0.2:
            return [*drafts[:place], self._dice.randrange(VOCABULARY)]
        return [*drafts[:place], chain.seconds[place]]

    def round(self, sampling: SamplingTensors) -> None:
        """One round: both propose the same, if anything."""
        said, came = self.committed(), self.seat()
        rows = [first or row for first, row in zip(came, said, strict=True)]
        tokens = torch.tensor([row + [PAD] * (K + 1 - len(row)) for row in rows], dtype=torch.int32)
        count = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        commit = Commit(tokens, count, torch.tensor(self.ends, dtype=torch.int32))
        self.ends = [end + len(row) if end else 0 for end, row in zip(self.ends, rows, strict=True)]
        bounds = RoundLimits([K] * self._slots, max(1, *self.ends))
        for one in (self.plain, self.ahead):
            one.update(commit)
        if self._dice.random() < 0.1:
            return  # drafts are not asked for in every round
        here, there = (d.propose(commit, sampling, bounds).tokens for d in (self.plain, self.ahead))
        for slot, end in enumerate(self.ends):
            assert end == 0 or torch.equal(here[slot], there[slot]), (slot, end, self.ahead.hit)
        self.hits += self.ahead.hit
        for _ in range(self._dice.randrange(7)):
            self.ahead.work()


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_asynchronous_proposals_equal_the_drafters(workshop: Workshop, slots: int, temperature: float) -> None:
    """Outcomes are read into the same rows, so that all but the last leave a cache that has to be put right."""
    texts = Texts(workshop, slots, random.Random(7))
    sampling = sampling_tensors([Sampling(temperature, seed=seed) for seed in range(slots)])
    for _ in range(80):
        texts.round(sampling)
    assert texts.hits > 10 and texts.early > 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_second_choices_are_the_drafters_next_best_tokens(workshop: Workshop, temperature: float) -> None:
    decoder, vocabulary = workshop.decoder("draft", slots=4).sibling(), VocabMap(VOCABULARY, VOCABULARY)
    sampling = sampling_tensors([Sampling(temperature, seed=seed) for seed in range(4)])
    commit = Commit(
        torch.tensor([[5, 6, PAD], [7, PAD, PAD], [1, 2, 3], [4, 4, PAD]], dtype=torch.int32),
        torch.tensor([2, 1, 3, 2], dtype=torch.int32),
        torch.tensor([1, 9, 4, 2], dtype=torch.int32),
    )
    texts = [[3] * int(start) for start in commit.first_row]
    for slot, text in enumerate(texts):
        steps.prefill(decoder, slot, text)
    model = ModelDrafter(decoder, K, vocabulary=vocabulary)
    drafts = model.propose(commit, sampling, RoundLimits(commit.count.tolist(), 12)).tokens
    seconds, gaps = SecondChoices(decoder, vocabulary).seconds(commit, drafts, sampling, rows=12)
    for slot, text in enumerate(texts):
        text += [*commit.tokens[slot, : commit.count[slot]].tolist(), *drafts[slot].tolist()]
        whole = torch.tensor([text], dtype=torch.int32)
        one = SamplingTensors(sampling.params[slot : slot + 1], sampling.seeds[slot : slot + 1])
        reader = workshop.decoder("draft", slots=1).sibling()
        logits, _ = steps.window(reader, whole, torch.zeros(1, dtype=torch.int32), bucket=POSITIONS)
        places = torch.arange(1, len(text) + 1, dtype=torch.int32).unsqueeze(0)
        scores = probs.apply_temperature(logits, one)
        if temperature:
            scores = probs.add_gumbel(scores, places, one, ids=torch.arange(VOCABULARY, dtype=torch.int32))
        best = scores[0, -K - 1 : -1].topk(2)
        assert best.indices[:, 0].tolist() == drafts[slot].tolist() and best.indices[:, 1].tolist() == seconds[slot]
        assert torch.allclose(best.values[:, 0] - best.values[:, 1], torch.tensor(gaps[slot]), atol=1e-4)


def test_failed_idle_work_is_not_repeated() -> None:
    """The server says so in its next answer, and continues."""
    ahead = working_ahead(1, 3)
    calm = ahead._inner.propose
    events = SpeculativeGenerator(ahead, TableDecoder(TARGET)).stream([PROMPT], max_new_tokens=40)
    for _ in range(3):
        next(events)
    ahead._inner.propose = None  # type: ignore[method-assign, assignment]
    with pytest.raises(TypeError):
        for _ in range(3):
            ahead.work()
    assert ahead.idle
    ahead.work()
    ahead._inner.propose = calm  # type: ignore[method-assign]
    assert PROMPT + [t for e in events for t in e.tokens] != PROMPT


def test_the_hit_rate_is_in_the_statistics() -> None:
    health = DrafterHealth(answered=8, ahead=6).since(DrafterHealth(answered=4, ahead=3))
    assert health.hit_rate == 0.75 and health.to_dict()["hit_rate"] == 0.75
    assert DrafterHealth().hit_rate == 0.0


def learnt(first: int, second: int, neither: int, gap: float) -> OutcomeModel:
    """Odds after ``count`` choices of one gap."""
    odds, chain = OutcomeModel(), DraftedSlot([5], 1, [6], [gap])
    for token, times in ((5, first), (6, second), (7, neither)):
        for _ in range(times):
            odds.learn(chain, [token])
    return odds


def test_outcome_odds_count_observations_up_to_the_first_rejection() -> None:
    odds = learnt(70, 20, 10, gap=0.6)
    assert odds.of(0.7) == (70.5 / 101, 20.25 / 101) == odds.of(None) and odds.of(3.5) == (0.5, 0.25)
    odds = OutcomeModel()
    odds.learn(DraftedSlot([5, 5, 5], 3, [6, 6, 6], [0.1, 2.5, 0.1]), [5, 6, 5])
    assert odds.of(0.1) == (1.5 / 2, 0.25 / 2) and odds.of(2.5) == (0.5 / 2, 1.25 / 2)
    odds.learn(DraftedSlot([PAD, 5], 2), [PAD, 5])
    assert odds.of(None) == (1.5 / 3, 1.25 / 3)


def test_old_texts_are_forgotten() -> None:
    odds, chain = learnt(2000, 0, 0, gap=0.1), DraftedSlot([5], 1, [6], [0.1])
    for _ in range(1500):
        odds.learn(chain, [6])
    assert odds.of(0.1)[1] > 0.9


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_all_outcomes_are_ordered_by_their_odds(slots: int) -> None:
    """Against all products of what may happen in each slot; the odds of all, with the unlikely ones, are at most 1."""
    odds = learnt(60, 20, 20, gap=0.3)
    for _ in range(50):
        odds.learn(DraftedSlot([5], 1, [6], [2.2]), [5])
    chains = [
        DraftedSlot([10, 11, 12], limit, [20, 21, 22], [0.3, 2.2, gap]) for limit, gap in ((2, 0.3), (1, 0.3), (0, 9.9))
    ]
    alone = []
    for chain in chains[:slots]:
        found, so_far = {}, 1.0
        for place in range(chain.limit + 1):
            first, second = odds.of(chain.gaps[place])  # type: ignore[index]
            found[(*chain.drafts[:place], 20 + place)] = so_far * second
            so_far *= first
        found[tuple(chain.drafts[: chain.limit + 1])] = so_far
        alone.append(found)
    wanted = {
        texts: math.prod(one[text] for one, text in zip(alone, texts, strict=True))
        for texts in itertools.product(*alone)
    }
    made = list(odds.outcomes(chains[:slots]))
    assert {one.tokens: pytest.approx(one.odds) for one in made} == {t: p for t, p in wanted.items() if p >= 0.01}
    assert [one.odds for one in made] == sorted((one.odds for one in made), reverse=True)
    full = odds.full(chains[:slots])
    assert full is not None and full.tokens in wanted and full.odds == pytest.approx(wanted[full.tokens])


def test_padding_is_not_an_expected_outcome() -> None:
    odds, chain = OutcomeModel(), DraftedSlot([5, PAD, PAD], 2, [6, 7, 8], [0.1, 0.1, 0.1])
    assert odds.full([chain]) is None and [one.tokens for one in odds.outcomes([chain])] == [((6,),)]
    assert list(odds.outcomes([chain, DraftedSlot([PAD], 0, [3], [0.1])])) == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_idle_work_starts_if_it_saves_more_than_it_costs() -> None:
    clock = Clock()
    idle = IdleBudget(clock)
    idle.begin()
    clock.now = 1e6
    assert idle.saves("draft", 0.01) > 0, "nothing is known yet"
    for pause in (20.0, 20.0, 500.0):  # the median: one prompt that was read meanwhile says nothing
        idle.paused(pause)
    for kind, takes in (("draft", 10.0), ("review", 2.0)):
        with idle.timed(kind):
            clock.now += takes
    idle.begin()
    assert idle.saves("draft", 0.25) == idle.saves("draft", 0.25, after="review") == 2.5  # done before the call
    clock.now += 14.0  # 6 of 10 are saved with the odds, 4 lost without
    assert idle.saves("draft", 0.5) == 1.0 and idle.saves("draft", 0.39) < 0 < idle.saves("draft", 0.41)
    assert idle.saves("draft", 0.75, after="review") == 1.5
    clock.now += 6.0
    assert idle.saves("draft", 1.0) == 0.0, "the target calls now"
