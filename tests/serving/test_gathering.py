"""Where many answers are under way, events of two rounds go together, soon enough; no byte is lost or changes place."""

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
        (MANY, OFTEN_S / 2, [b"a", b"", b"bc", b"", b"de", b"f"]),
        (MANY, OFTEN_S, [b"a", b"b", b"c", b"d", b"e", b"f"]),  # rounds are slow, so nothing waits
    ],
)
def test_a_stream_gets_every_second_message_of_short_rounds(answers: int, step_s: float, sent: list[bytes]) -> None:
    assert sent_of(ROUNDS, answers=answers, step_s=step_s) == sent


def test_rounds_without_events_change_nothing() -> None:
    assert sent_of([b"a", b"", b"b", b"", b"", b"c"], answers=MANY, step_s=OFTEN_S / 9) == [
        b"a",
        b"",
        b"",
        b"b",
        b"",
        b"c",
    ]


def test_what_waits_is_there_for_who_ends_a_stream_early() -> None:
    gathering = Gathering(Clock())
    gathering.add(b"a", answers=MANY, ended=False)
    assert gathering.add(b"b", answers=MANY, ended=False) == b""
    assert gathering.rest() == b"b" and gathering.rest() == b""
