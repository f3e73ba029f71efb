"""When the next message is due: never later than it came of late."""

from __future__ import annotations

from paceline.placement.remote.channel import DueTime


def test_it_is_expected_after_the_shortest_pause_of_late_and_a_little_before() -> None:
    due = DueTime()
    assert due.milliseconds() == 1, "nothing is known"
    for seconds in (0.0201, 0.0053, 0.0302):
        due.observe(seconds)
    assert due.milliseconds() == 4 and due.milliseconds(0.0021) == 2 and due.milliseconds(0.5) == 1
    for _ in range(8):
        due.observe(0.0302)
    assert due.milliseconds() == 29, "what was long ago is forgotten"
    due.observe(0.0002)
    assert due.milliseconds() == 1
