"""Whatever happens between a target and its drafter's process, it has read every sequence that it is asked about."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.core.types import PAD, Commit
from paceline.placement.remote.drafter import CommitRows, SequenceTracker

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
def test_the_process_has_read_all_that_comes_before_the_commit(max_positions: int | None) -> None:
    for seed in range(60):
        both = Both(seed, max_positions)
        for _ in range(80):
            both.dice.choice([both.round] * 8 + [both.admit, both.release])()
        assert both.rereads


def test_sequences_that_simply_go_on_are_not_read_again() -> None:
    both = Both(3, None)
    both.dice.random = lambda: 0.5  # type: ignore[method-assign]  # nothing fails, and every round asks
    for _ in range(6):
        both.admit()
        for _ in range(10):
            both.round()
    assert len(both.texts) > 1 and both.rereads == 0


def test_a_process_that_cannot_read_all_sequences_in_time_catches_up_nevertheless() -> None:
    """It reads one in time, and eight wait. A late reply is there before the round after the next."""
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
