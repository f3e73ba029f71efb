"""Waiting in time: what is asked of the poll, with a clock that moves only when it is asked."""

from __future__ import annotations

import pytest

from paceline.placement import rhythm
from paceline.placement.rhythm import Rhythm


class Clock:
    """Time passes in sleeps, and a little in every look; the message comes at ``due``."""

    def __init__(self) -> None:
        self.now, self.due = 0.0, 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def ready(self, seconds: float) -> bool:
        self.sleeps.append(seconds)
        self.now += 2e-5
        if self.now + seconds < self.due:
            self.now += seconds
            return False
        self.now = max(self.now, self.due)
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rhythm, "perf_counter", made)
    return made


def test_a_regular_message_finds_somebody_awake(clock: Clock) -> None:
    waits = Rhythm()
    for turn in range(20):
        clock.sleeps.clear()
        clock.due = clock.now + 0.0102
        assert waits.wait(clock.ready, 5.0)
        assert clock.sleeps[0] == (5.0 if not turn else pytest.approx(0.009))
        assert not turn or set(clock.sleeps[1:]) == {0.0}
        assert len(clock.sleeps) < 100


def test_what_does_not_come_is_slept_for(clock: Clock) -> None:
    waits = Rhythm()
    clock.due = clock.now + 0.004
    assert waits.wait(clock.ready, 5.0)
    clock.due, begin = clock.now + 99, clock.now
    clock.sleeps.clear()
    assert not waits.wait(clock.ready, 0.5)
    assert clock.now - begin == pytest.approx(0.5, abs=0.01) and sum(clock.sleeps) > 0.49
    clock.due = clock.now + 0.2
    clock.sleeps.clear()
    assert waits.wait(clock.ready, 5.0) and clock.sleeps == [5.0]  # a miss makes it forget
    clock.sleeps.clear()
    clock.due = clock.now + 0.2
    assert waits.wait(clock.ready, 5.0) and clock.sleeps == [5.0]  # and what is rare is not learnt


def test_there_is_an_end_before_the_usual_time(clock: Clock) -> None:
    waits = Rhythm()
    clock.due = clock.now + 0.01
    assert waits.wait(clock.ready, 1.0)
    clock.due, begin = clock.now + 0.01, clock.now
    assert not waits.wait(clock.ready, 0.003)
    assert clock.now - begin == pytest.approx(0.003, abs=0.001)
