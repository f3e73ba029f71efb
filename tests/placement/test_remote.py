"""A drafter in another process: the same tokens as in this one, whatever happens to it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.drafter_statistics import DrafterHealth
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits
from paceline.draft.suffix import SuffixDrafter
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.drafter import CommitRows, DrafterContract, DraftTimeouts, RemoteDrafter, SequenceTracker
from paceline.placement.remote.messages import Handshake
from paceline.placement.remote.reconnect import DrafterEndpoint
from paceline.placement.remote.server import UnpooledDrafters
from tests.fakes import Checked, TableDecoder
from tests.placement.faulty import DRAFT, FAULTS, SECRET, TARGET, Faulty, Forked, V, drafter, serving, working_ahead
from tests.sampled import run, texts
from tests.waiting import until

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3]]
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_p": 0.95}
HASTE = DraftTimeouts(
    reply_timeout_s=0.25, resync_timeout_s=5.0, hang_timeout_s=0.4, max_failures=3, backoff_s=0.002, max_backoff_s=0.02
)

PATIENT = replace(HASTE, reply_timeout_s=60.0, resync_timeout_s=60.0, hang_timeout_s=120.0)
"""For drafters that answer, however busy the machine is."""


def remote(
    supervisor: Forked, *, slots: int = 1, k: int = 4, timeouts: DraftTimeouts = HASTE, wait: bool = True
) -> RemoteDrafter:
    contract = DrafterContract(num_draft_tokens=k, slots=slots, vocab_size=V, max_positions=64)
    made = RemoteDrafter(
        contract, DrafterEndpoint(supervisor.address, SECRET, supervisor, startup_timeout_s=8), timeouts=timeouts
    )
    assert not wait or made.wait_until_up(30)
    return made


def served(tmp_path: Path, stack: ExitStack, make: Callable[[Handshake], Drafter], **more: Any) -> RemoteDrafter:
    """A drafter with a socket, in a thread of this process."""
    address = Address(path=str(tmp_path / "s"))
    stack.enter_context(serving(listen(address), UnpooledDrafters(make)))
    contract = DrafterContract(4, 1, V, max_positions=64)
    draft = stack.enter_context(closing(RemoteDrafter(contract, DrafterEndpoint(address, SECRET), **more)))
    assert draft.wait_until_up(30)
    return draft


def target(slots: int = 1) -> TableDecoder:
    return TableDecoder(TARGET, slots=slots)


def wanted(prompts: list[list[int]], **asked: object) -> list[list[int]]:
    return texts(run(SpeculativeGenerator(None, target()), prompts, **asked))


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("asked", [{}, {**SAMPLED, "seed": 3}])
def test_a_remote_drafter_equals_a_local_one(tmp_path: Path, stack: ExitStack, slots: int, asked: dict) -> None:
    forked = stack.enter_context(closing(Forked(tmp_path)))
    draft = stack.enter_context(closing(remote(forked, slots=slots, timeouts=PATIENT)))
    calm = {"max_new_tokens": 30, **asked}
    there = run(Checked(draft, target(slots)), PROMPTS, **calm)
    here = run(Checked(TableDecoder(DRAFT, slots=slots), target(slots)), PROMPTS, **calm)
    assert texts(there) == texts(here) == wanted(PROMPTS, **calm)
    health = there.statistics.drafter_health
    assert health is not None and health.state == "up" and health.faults == 0 and health.answered == health.asked > 0
    if slots == len(PROMPTS):  # one of them alone never proposes less than the other
        counted = [(one.statistics.num_accepted_tokens, one.statistics.num_rounds) for one in (there, here)]
        assert counted[0] == counted[1]
    assert there.statistics.num_accepted_tokens > 0


def test_proposals_of_any_length_are_sent_at_the_agreed_length(tmp_path: Path, stack: ExitStack) -> None:
    draft = served(tmp_path, stack, lambda _: SuffixDrafter(4))
    done = run(SpeculativeGenerator(draft, target()), PROMPTS, max_new_tokens=30)
    assert texts(done) == wanted(PROMPTS, max_new_tokens=30)
    health = done.statistics.drafter_health
    assert health is not None and health.faults == 0 and health.answered == health.asked > 0
    assert done.statistics.num_draft_tokens > 0


def test_a_remote_self_draft_is_always_accepted(tmp_path: Path, stack: ExitStack) -> None:
    draft = served(tmp_path, stack, lambda hello: drafter(hello.slots, 4, TARGET), timeouts=PATIENT)
    done = run(SpeculativeGenerator(draft, target()), [PROMPTS[3]], max_new_tokens=21)
    assert texts(done) == wanted([PROMPTS[3]], max_new_tokens=21)
    assert done.statistics.num_accepted_tokens == done.statistics.num_draft_tokens > 0


def revived(draft: RemoteDrafter) -> None:
    """Wait until there is a process again; an answer that is overdue is looked at in the next round only."""
    until(lambda: draft.health.state != "down", what=lambda: draft.health)


@pytest.mark.full
def test_two_hundred_faults_change_no_token(tmp_path: Path, stack: ExitStack) -> None:
    """Faults of every kind at random, from inside and from outside; every text is that of plain decoding."""
    dice = random.Random(11)
    supervisor = stack.enter_context(closing(Forked(tmp_path, faults=FAULTS, rate=0.25, slow=0.3)))
    draft = stack.enter_context(closing(remote(supervisor, slots=2)))
    generator = Checked(draft, target(2))
    signals, total, answered = 0, DrafterHealth(), 0
    for turn in range(200):
        asked = {"max_new_tokens": 40, "seed": turn, **(SAMPLED if turn % 2 else {})}
        prompts = dice.sample(PROMPTS, 2)
        found = [list(prompt) for prompt in prompts]
        hit = dice.randrange(30) if signals < 12 and turn % 2 else -1
        for number, event in enumerate(generator.stream(prompts, **asked)):
            found[event.index] += event.tokens
            if number == hit:
                supervisor.signal(dice.choice((signal.SIGKILL, signal.SIGSTOP)))
                signals += 1
        assert found == wanted(prompts, **asked), (turn, draft.health)
        health = generator.statistics.drafter_health
        assert health is not None
        total = draft.health
        if total.faults >= 200:
            break
        if turn % 4 == 0:
            revived(draft)
    answered = total.answered
    assert total.faults >= 200 and signals >= 10 and answered > 100, (signals, asdict(total))
    assert min(total.lost, total.late, total.failed, total.invalid, total.restarts) > 5, asdict(total)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_counted_by_its_kind(tmp_path: Path, stack: ExitStack, fault: str) -> None:
    supervisor = stack.enter_context(closing(Forked(tmp_path, faults=[fault], rate=1.0, slow=0.3)))
    draft = stack.enter_context(closing(remote(supervisor, timeouts=HASTE)))
    generator = Checked(draft, target())
    asked = {"max_new_tokens": 12, "seed": 5, **SAMPLED}
    assert texts(run(generator, PROMPTS[:1], **asked)) == wanted(PROMPTS[:1], **asked)
    health = generator.statistics.drafter_health
    assert health is not None
    kinds = {"raise": "failed", "float": "failed", "drawn": "failed", "slow": "late", "die": "lost", "nan": "answered"}
    if fault == "slow":  # the first round of a request may take longer
        assert health.answered + health.late == health.asked
        return
    assert getattr(health, kinds.get(fault, "invalid")) > 0, health
    assert fault == "nan" or health.answered == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_speculation_resumes_within_a_request(tmp_path: Path, stack: ExitStack, number: signal.Signals) -> None:
    supervisor = stack.enter_context(closing(Forked(tmp_path)))
    killed = number == signal.SIGKILL  # which is seen at once: only one that is stopped is waited for
    draft = stack.enter_context(closing(remote(supervisor, timeouts=PATIENT if killed else HASTE)))
    generator = Checked(draft, target())
    found, before, after = list(PROMPTS[0]), 0, 0
    for index, event in enumerate(generator.stream(PROMPTS[:1], max_new_tokens=56)):
        found += event.tokens
        if index == 3:
            before = draft.health.answered
            supervisor.signal(number)
        elif index == 7 and number == signal.SIGSTOP:
            time.sleep(HASTE.hang_timeout_s)
        elif index == 9:
            revived(draft)
    after = draft.health.answered
    assert [found] == wanted(PROMPTS[:1], max_new_tokens=56)
    assert 0 < before < after and draft.health.restarts >= 1 and draft.health.rereads >= 1
    assert not killed or draft.health.restarts == draft.health.rereads == 1


def test_a_drafter_that_never_comes_costs_no_token(tmp_path: Path, stack: ExitStack) -> None:
    supervisor = stack.enter_context(closing(Forked(tmp_path)))
    supervisor.close()
    draft = stack.enter_context(closing(remote(supervisor, wait=False)))
    done = run(SpeculativeGenerator(draft, target()), PROMPTS, max_new_tokens=9)
    assert texts(done) == wanted(PROMPTS, max_new_tokens=9)
    health = done.statistics.drafter_health
    assert health is not None and health.state == "down" and health.asked == 0 < health.skipped


@pytest.mark.parametrize("max_failures", [1 << 30, 1100], ids=["asked again", "restarted"])
def test_a_permanently_failing_drafter_is_not_an_error(tmp_path: Path, stack: ExitStack, max_failures: int) -> None:
    """Each fault doubled the time it rests, in a number that floats have no room for after a thousand of them."""
    timeouts = replace(PATIENT, max_failures=max_failures, backoff_s=1e-9, max_backoff_s=1e-9)
    failing = Faulty(1, 4, faults=["raise"], rate=1.0, seed=0, slow=0.0)
    draft = served(tmp_path, stack, lambda _: failing, timeouts=timeouts)
    draft.add_request(0, [1, 2])
    one = torch.ones(1, dtype=torch.int32)
    commit = Commit(torch.tensor([[3, -1, -1, -1, -1]], dtype=torch.int32), one, 2 * one)
    draft.update(commit)
    sampling, limits = sampling_tensors([Sampling()]), RoundLimits([4], 3)
    for _ in range(1100):
        assert draft.propose(commit, sampling, limits).tokens.tolist() == [[-1] * 4]
    assert draft.health.failed == 1100


def test_a_target_reports_its_working_time_without_idle_time(tmp_path: Path, stack: ExitStack) -> None:
    ahead, pauses = working_ahead(1, 4), []
    ahead.paused = pauses.append  # type: ignore[method-assign]
    draft = served(tmp_path, stack, lambda _: ahead)
    for requests in (1, 2):
        done = run(SpeculativeGenerator(draft, target()), PROMPTS[:1], max_new_tokens=40)
        assert texts(done) == wanted(PROMPTS[:1], max_new_tokens=40)
        assert len(pauses) == draft.health.answered - requests > 0 and min(pauses) > 0


SLOTS, WIDTH = 3, 3


class Both:
    """Sequences as they are, the tracker that follows them, and a process that reads what it is sent."""

    def __init__(self, seed: int, max_positions: int | None) -> None:
        self.dice, self.max_positions, self.tracker = random.Random(seed), max_positions, SequenceTracker(max_positions)
        self.texts: dict[int, list[int]] = {}
        self.process: dict[int, list[int]] = {}
        self.rereads = 0

    def admit(self) -> None:
        slot = self.dice.randrange(SLOTS)
        prompt = [self.dice.randrange(90) for _ in range(self.dice.randrange(1, 6))]
        self.texts[slot] = list(prompt)
        self.tracker.add_request(slot, prompt)
        if self.dice.random() < 0.7:
            self.tracker.mark_read(slot)
            self.process[slot] = list(prompt)
        else:
            self.process.pop(slot, None)

    def release(self) -> None:
        slot = self.dice.randrange(SLOTS)
        self.texts.pop(slot, None)
        self.tracker.finish_request(slot)

    def round(self) -> None:
        tokens, count, start = [], [], []
        for slot in range(SLOTS):
            on = slot in self.texts and self.dice.random() < 0.9  # the others stand still
            size = self.dice.randrange(1, WIDTH + 1) if on else 0
            row = [self.dice.randrange(90) for _ in range(size)]
            start.append(len(self.texts[slot]) if on else 0)
            if on:
                self.texts[slot] += row
            tokens.append(row + [PAD] * (WIDTH - size))
            count.append(size)
        commit = Commit(*(torch.tensor(numbers, dtype=torch.int32) for numbers in (tokens, count, start)))
        for _ in range(self.dice.choice((1, 1, 1, 2))):
            self.tracker.record(commit)
        if self.dice.random() < 0.7:
            self.ask(commit)

    def ask(self, commit: Commit) -> None:
        rows = CommitRows.of(commit)
        missing = self.tracker.missing(commit, rows)
        self.rereads += len(missing)
        fails = self.dice.random() < 0.1
        if fails and self.dice.random() < 0.5:
            self.tracker.reset()  # it could not be sent
            return
        self.tracker.sent(rows)
        self.process |= {slot: list(text) for slot, text in missing}
        for slot, text in self.texts.items():
            if rows.counts[slot] and (self.max_positions is None or len(text) <= self.max_positions):
                start = rows.first_rows[slot]
                assert self.process[slot][:start] == text[:start] and len(self.process[slot]) == start
                self.process[slot] = list(text)
        if fails:
            self.process = {}
            self.tracker.reset()
        else:
            self.tracker.acked()


@pytest.mark.parametrize("max_positions", [None, 30])
def test_the_remote_drafter_has_read_everything_before_the_commit(max_positions: int | None) -> None:
    for seed in range(60):
        both = Both(seed, max_positions)
        for _ in range(80):
            both.dice.choice([both.round] * 8 + [both.admit, both.release])()
        assert both.rereads


def test_continued_sequences_are_not_prefilled_again() -> None:
    both = Both(3, None)
    both.dice.random = lambda: 0.5  # type: ignore[method-assign]  # nothing fails, and every round asks
    for _ in range(6):
        both.admit()
        for _ in range(10):
            both.round()
    assert len(both.texts) > 1 and both.rereads == 0


def test_a_slow_remote_prefill_catches_up() -> None:
    """One sequence is read in time, and eight wait. A late reply arrives before the round after the next."""
    slots, tracker, texts = 8, SequenceTracker(None), [[7] * (5 + slot) for slot in range(8)]
    for slot, text in enumerate(texts):
        tracker.add_request(slot, text)
    read: dict[int, int] = {}
    late = 0
    for number in range(60):
        commit = Commit(
            torch.full((slots, 1), number, dtype=torch.int32),
            torch.ones(slots, dtype=torch.int32),
            torch.tensor([len(text) for text in texts], dtype=torch.int32),
        )
        for text in texts:
            text.append(number)
        tracker.record(commit)
        if number % 3 == 1 and late:  # a round in which the last reply is still awaited
            continue
        if number % 3 == 2 and late:
            tracker.acked_late()
            late = 0
        rows = CommitRows.of(commit)
        missing = tracker.missing(commit, rows)
        for slot, text in missing:
            assert list(text) == texts[slot][:-1]
            read[slot] = len(text)
        sent = rows.without(tracker.left_out)
        for slot in set(range(slots)) - tracker.left_out:
            assert read[slot] == sent.first_rows[slot], "it is asked about what it has read"
            read[slot] += 1
        tracker.sent(sent)
        if len(missing) > 1:
            tracker.overdue()
            late = 1
        else:
            tracker.acked()
            if not tracker.left_out and not missing:
                return
    pytest.fail("it never has all sequences")
