"""Where many answers are under way, events of several rounds go together; no byte is lost or changes place."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from paceline.serving.gathering import MANY, OFTEN_S, Gathering


class Clock:
    """Says the time that it was told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def sent_of(rounds: list[bytes], *, answers: int, step_s: float) -> list[bytes]:
    clock = Clock()
    gathering, sent = Gathering(clock), list[bytes]()
    for number, data in enumerate(rounds):
        sent.append(gathering.add(data, answers=answers, ended=number == len(rounds) - 1))
        clock.now += step_s
    assert gathering.rest() == b""
    return sent


ROUNDS = [b"a", b"b", b"c", b"d", b"e", b"f"]


@pytest.mark.parametrize(
    ("answers", "step_s", "sent"),
    [
        (MANY - 1, 0.0, [b"a", b"b", b"c", b"d", b"e", b"f"]),
        (MANY, 0.6 * OFTEN_S, [b"a", b"", b"bc", b"", b"de", b"f"]),
        (MANY, 2 * OFTEN_S, [b"a", b"b", b"c", b"d", b"e", b"f"]),  # rounds are slow, so nothing waits
    ],
)
def test_events_of_short_rounds_wait_where_there_are_many_answers(
    answers: int, step_s: float, sent: list[bytes]
) -> None:
    assert sent_of(ROUNDS, answers=answers, step_s=step_s) == sent


def test_what_waits_goes_with_the_next_round_that_ends_late_enough() -> None:
    sent = sent_of([b"a", b"", b"b", b"c", b"", b"d", b"e"], answers=MANY, step_s=0.3 * OFTEN_S)
    assert sent == [b"a", b"", b"", b"", b"bc", b"", b"de"]


def test_what_waits_is_there_for_who_ends_a_stream_early() -> None:
    gathering = Gathering(Clock())
    gathering.add(b"a", answers=MANY, ended=False)
    assert gathering.add(b"b", answers=MANY, ended=False) == b""
    assert gathering.rest() == b"b" and gathering.rest() == b""
