"""Draft length chosen in every round: the choice never changes a token. How it is made is in `test_pace`."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch

from paceline import DRAFT_LENGTHS, SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Commit
from paceline.engine.adaptive import DraftLengthController, DraftLengthPolicy
from paceline.engine.rounds import fitted
from tests.decoder.tiny import Workshop
from tests.fakes import Checked, TableDecoder, near, rebuild, table

V = 12
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.6)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8]]
TWO: dict[str, Any] = {"slots": 2, "kv_buckets": (32, 64)}


def table_target() -> TableDecoder:
    return TableDecoder(TARGET, **TWO)


def adaptive(controller: DraftLengthController, draft: object = None, **options: Any) -> Checked:
    """A generator whose draft lengths are chosen by a controller."""
    made = Checked(draft or TableDecoder(DRAFT, **TWO), table_target(), k=controller.draft_lengths, **options)
    rebuild(made, controller=controller)
    return made


class Told(DraftLengthController):
    """A controller with a given sequence of draft lengths, which keeps its records."""

    def choose(self, deepest: int) -> int:
        return self.plan.pop(0)

    def record(
        self, length: int, *, requested: list[int], accepted: list[int], seconds: float | None, rows: int = 0
    ) -> None:
        self.heard.append((length, seconds is not None))


def test_catch_up_time_is_not_counted_for_a_draft_length() -> None:
    policy = Told((0, 2))
    policy.plan, policy.heard = [2, 2, 0, 0, 2, 2, 0, 2], []
    stream = adaptive(policy).stream([[1, 2, 3]], max_new_tokens=60)
    while policy.plan:
        next(stream)
    stream.close()
    timed = [length == 0 or late for length, late in policy.heard]
    assert timed[:8] == [True, True, True, True, False, True, True, False]


@pytest.mark.parametrize("fused", [None, False])
def test_every_draft_length_is_tried_with_a_mostly_silent_drafter(fused: bool | None) -> None:
    maker = Checked(TableDecoder(DRAFT), TableDecoder(TARGET), k=DRAFT_LENGTHS, confidence_threshold=0.9, fused=fused)
    maker.sample([[1, 2, 3]], max_new_tokens=40)
    assert set(maker.statistics.draft_lengths) == set(DRAFT_LENGTHS)


class Dice(DraftLengthController):
    """Any draft length at any time."""

    def choose(self, deepest: int) -> int:
        self.turn = getattr(self, "turn", -1) + 1
        dice = random.Random(self.turn)
        self.rounds = dice.randint(1, 5)
        return dice.choice(self.draft_lengths)


class Sensible(Dice):
    """The same, but for rounds in which nothing can be accepted."""

    def choose(self, deepest: int) -> int:
        return super().choose(deepest) if deepest else 0


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("heat", [{}, {"do_sample": True, "seed": 4}])
@pytest.mark.parametrize(("acceptor", "exact"), [("match", True), ("match", False), ("reject", True)])
def test_random_draft_lengths_leave_no_cache_gap_and_change_no_token(
    acceptor: str, exact: bool, heat: dict, fused: bool | None
) -> None:
    """Not exact: depth 0 takes several plain steps in one graph."""
    how = {"acceptor": acceptor, "exact": exact, "fused": fused}
    maker = adaptive(Dice(DRAFT_LENGTHS), **how)
    made = maker.sample(PROMPTS, max_new_tokens=40, **heat)
    if acceptor == "match" or not heat:
        assert torch.equal(made, table_target().sample(PROMPTS, max_new_tokens=40, **heat))
    assert set(maker.statistics.draft_lengths) == set(DRAFT_LENGTHS)
    itself = adaptive(Dice(DRAFT_LENGTHS), table_target(), **how)
    itself.sample(PROMPTS, max_new_tokens=40, **heat)
    assert itself.statistics.num_accepted_tokens == itself.statistics.num_draft_tokens > 0


class Late(DraftLengthController):
    """No draft in the first rounds, then the longest ones."""

    def choose(self, deepest: int) -> int:
        self.turn = getattr(self, "turn", 0) + 1
        self._length = self.draft_lengths[-1] if self.turn > 8 else 0
        self.read = [*getattr(self, "read", ()), self.draft.body.forwards]
        return self._length


@pytest.mark.parametrize("fused", [None, False])
def test_a_draft_reads_no_prompt_before_drafts_are_wanted(fused: bool | None) -> None:
    draft, policy = table_target(), Late((0, 2))
    maker, policy.draft = adaptive(policy, draft, fused=fused), draft
    policy._length, before = 0, draft.body.forwards
    maker.engine.rounds._inner._policy.at(2)
    assert torch.equal(maker.sample(PROMPTS, max_new_tokens=40), table_target().sample(PROMPTS, max_new_tokens=40))
    assert maker.statistics.num_accepted_tokens == maker.statistics.num_draft_tokens > 0
    assert before == policy.read[8] < policy.read[9]


def test_a_commit_too_wide_for_a_draft_length_is_split() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, PAD, PAD, PAD]], dtype=torch.int32)
    whole = Commit(tokens, torch.tensor([5, 2], dtype=torch.int32), torch.tensor([10, 20], dtype=torch.int32))
    early, last = fitted(whole, 3)
    assert early is not None and early.count.tolist() == [2, 0] and early.first_row.tolist() == [10, 0]
    assert early.tokens[0, :2].tolist() == [1, 2]
    assert last.tokens.tolist() == [[3, 4, 5], [6, 7, PAD]]
    assert last.count.tolist() == [3, 2] and last.first_row.tolist() == [12, 20]
    early, same = fitted(last, 5)
    assert early is None and same.tokens.tolist() == [[3, 4, 5, PAD, PAD], [6, 7, PAD, PAD, PAD]]
    early, back = fitted(same, 3)
    assert early is None and back.tokens.tolist() == last.tokens.tolist()
    for made in (last, same, back):
        assert made.tokens.dtype == made.count.dtype == made.first_row.dtype == torch.int32
        assert made.tokens.is_contiguous()


def test_an_adaptive_length_builds_the_graphs_of_its_lengths_ahead(workshop: Workshop) -> None:
    """Those that a generator of one depth has, and a rest: each drafter reads commits as wide as its own."""
    draft, target = workshop.pair(backend="eager")
    target = target.sibling()  # with graphs of its own
    plain = target.sample(PROMPTS, max_new_tokens=40)
    maker = SpeculativeGenerator(draft, target, k=DRAFT_LENGTHS, exact=False)
    rebuild(maker, controller=Sensible(DRAFT_LENGTHS))
    maker.compile()
    made = {key for key, _ in target._steps}
    assert {(key.commit_width, key.next_width) for key in made if key.is_round} == {(w, w) for w in (1, 2, 3, 5, 9)}
    assert torch.equal(maker.sample(PROMPTS, max_new_tokens=40), plain)
    assert set(maker.statistics.draft_lengths) == set(DRAFT_LENGTHS) and {key for key, _ in target._steps} == made


@pytest.mark.parametrize("heat", [{}, {"do_sample": True, "seed": 4, "top_p": 0.9}])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_several_plain_steps_in_one_graph_equal_plain_decoding(k: int, heat: dict) -> None:
    call = {"max_new_tokens": 45, "eos_token_id": [3], "pad_token_id": 0, **heat}
    maker = Checked(None, table_target(), k=k)
    assert torch.equal(maker.sample(PROMPTS, **call), table_target().sample(PROMPTS, **call))
    done = maker.statistics
    assert (done.num_draft_tokens, done.num_accepted_tokens, done.tau) == (0, 0, 1.0)
    assert done.num_rounds >= done.new_tokens - len(PROMPTS)  # steps; some ran past an end
    assert max(len(event.tokens) for event in maker.stream(PROMPTS, max_new_tokens=45)) == k + 1


class Rests(DraftLengthController):
    """Never drafts."""

    def choose(self, deepest: int) -> int:
        return 0


def test_pauses_run_several_plain_steps_unless_the_context_is_full() -> None:
    maker = adaptive(Rests(DRAFT_LENGTHS), exact=False)
    assert torch.equal(maker.sample(PROMPTS, max_new_tokens=41), table_target().sample(PROMPTS, max_new_tokens=41))
    done = maker.statistics
    assert (done.num_draft_tokens, done.tau) == (0, 1.0) and len(done.draft_lengths) < 41
    events = list(maker.stream(PROMPTS, max_new_tokens=41))
    assert max(len(event.tokens) for event in events) == 5
    # Who does without drafts has no limit to tell how much is wanted: one token a round, for all.
    events = list(maker.stream(PROMPTS[:2], max_new_tokens=41, use_speculation=[True, False]))
    assert max(len(event.tokens) for event in events) == 1


def test_the_controller_is_selected_by_the_batch_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def at(controllers: DraftLengthPolicy, seated: int) -> DraftLengthController:
        seen.append(seated)
        return real(controllers, seated)

    real = DraftLengthPolicy.at
    monkeypatch.setattr(DraftLengthPolicy, "at", at)
    maker = Checked(TableDecoder(DRAFT, slots=4), TableDecoder(TARGET, slots=4), k=DRAFT_LENGTHS)
    plain = TableDecoder(TARGET, slots=4)
    for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
        seen.clear()
        assert torch.equal(maker.sample(prompts, sequence_length=33), plain.sample(prompts, sequence_length=33))
        assert set(seen) >= {1, len(prompts)} and max(seen) == len(prompts)


def test_a_request_can_disable_drafting() -> None:
    """That no token depends on it: `tests/contract/test_random.py`."""
    maker = Checked(TableDecoder(DRAFT, **TWO), table_target(), k=3)
    drafted = []
    for asked in (True, [True, False, True, False], False):
        maker.sample(PROMPTS, max_new_tokens=30, use_speculation=asked)
        drafted.append(maker.statistics.num_draft_tokens)
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_the_reason_for_separate_graphs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Draft and target share a graph by themselves; a processor on the host keeps them apart."""
    for asked, said in (({}, False), ({"repetition_penalty": 1.2}, True), ({"output_scores": True}, True)):
        maker = Checked(TableDecoder(DRAFT), TableDecoder(TARGET), k=3)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="paceline"):
            maker.sample([[1, 2]], max_new_tokens=4, **asked)
        assert ("need the host at every token" in caplog.text) is said


@pytest.mark.parametrize("fused", [None, False])
def test_an_unconfident_draft_stops_early(fused: bool | None) -> None:
    plain = table_target().sample(PROMPTS, max_new_tokens=30)
    drafted, rates = [], []
    for confidence in (0.0, 0.5, 0.9, 1.0):
        maker = Checked(TableDecoder(DRAFT, **TWO), table_target(), k=4, confidence_threshold=confidence, fused=fused)
        assert torch.equal(maker.sample(PROMPTS, max_new_tokens=30), plain)
        drafted.append(maker.statistics.num_draft_tokens)
        rates.append(maker.statistics.acceptance_rate)
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[2] and drafted[3] == 0
    assert rates[2] > rates[0]
    with pytest.raises(ConfigurationError, match=r"confidence_threshold: expected .*, got 2"):
        SpeculativeGenerator(TableDecoder(DRAFT), TableDecoder(TARGET), confidence_threshold=2)
