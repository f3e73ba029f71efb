"""What nobody else asks whether it answers is killed when it does not, and only then."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from paceline.serving.ray_guard import WatchedActor, pause_s


class Actor(WatchedActor):
    """``answers``: to each question; ``processes``: the pid after each that has none, the last one from there on."""

    def __init__(self, answers: str, processes: list[int | None]) -> None:
        super().__init__("a", "b")
        self._answers, self._processes, self.killed = list(answers), processes, list[int | None]()

    def process(self) -> int | None:
        return self._processes.pop(0) if self._processes[1:] else self._processes[0]

    def answers(self) -> bool:
        return self._answers.pop(0) == "y"

    def kill(self) -> None:
        self.killed.append(self._processes[0])


def killed_after(answers: str, processes: list[int | None]) -> list[int | None]:
    actor = Actor(answers, processes)
    for _ in range(len(answers)):
        actor.look()
    return actor.killed


@pytest.mark.parametrize(
    ("answers", "processes", "killed"),
    [
        ("nnn", [1], [1]),
        ("nnnnnn", [1], [1, 1]),  # it still runs, so it is killed again
        ("nnynn", [1], []),  # a slow answer, and then one
        ("nnn", [1, 1, 2], []),  # somebody else has replaced it
        ("nnnnn", [None], []),  # it is being started
        ("nnnn", [1, None, 2, 2], []),
    ],
)
def test_what_does_not_answer_three_times_in_a_row_is_killed(
    answers: str, processes: list[int | None], killed: list[int]
) -> None:
    assert killed_after(answers, processes) == killed


def test_the_questions_of_a_cluster_are_no_more_the_more_nodes_it_has() -> None:
    assert pause_s(1) == pause_s(4) == 2
    small, large = (4 * count / pause_s(count) for count in (4, 100))  # of four replicas on each node
    assert small == large


def test_who_got_no_answer_asks_again_as_soon_as_in_a_small_cluster() -> None:
    watch = Actor("ny", [1])
    pauses = []
    for _ in range(2):
        watch.look()
        pauses.append(pause_s(100, suspects=watch.suspects))
    assert pauses == [pause_s(1), pause_s(100)]
