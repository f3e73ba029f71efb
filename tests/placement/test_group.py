"""What is heard of a group that could not be brought back; workers themselves are `test_ray`'s."""

from __future__ import annotations

import tempfile

import pytest

pytest.importorskip("ray")

from paceline.core.errors import PlanError, WorkerError
from paceline.placement import INSTANCES, FaultPolicy, plan
from paceline.placement.cluster import deployment
from paceline.placement.cluster.deployment import Deployment, Worker
from paceline.placement.cluster.worker_spec import Location, worker_specs
from paceline.placement.host.processes import Process
from tests.placement.wishes import model


class Broken(deployment.WorkerGroup):
    """Its node lives, and its target does not start again."""

    def _nodes_live(self) -> bool:
        return True

    def _respawn(self, label: str) -> None:
        raise WorkerError("its folder is gone")


def test_a_failed_restart_says_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_kill", [].append)
    made = plan([model("chat")], INSTANCES["inf2.48xlarge"])
    broken = Broken(made.instance, made.placements, FaultPolicy(), existing=object())
    location = Location("chat", "here", made.placements[0].cores)
    (spec,) = worker_specs(made.instance, made.placements, FaultPolicy(), locations={"chat": location}).values()
    broken._workers["chat"] = Worker(spec, seen := object())
    with pytest.raises(WorkerError, match=r"could not be started again \(its folder is gone\)"):
        broken.restart("chat", seen)
    broken._workers["chat"].process, killed = (process := Process(77, 1)), []
    monkeypatch.setattr(deployment.nodes, "kill", lambda *process: killed.append(process))
    for _ in range(2):  # the number may be another process's by the second time
        with pytest.raises(WorkerError, match="could not be started again"):
            broken.restart("chat", seen, hung=True)
    assert killed == [("here", process)]
    models = Deployment(made, FaultPolicy(), [broken])
    assert models.cores() == {}  # nothing runs, and that is no error
    broken.stop()
    for asked in (lambda: broken.actor("chat"), lambda: broken.restart("chat", seen), broken.launch):
        with pytest.raises(WorkerError, match="stopped"):
            asked()


class Stubborn:
    """A group that does not start, and cannot be ended as it should."""

    placements: tuple[()] = ()

    def __init__(self) -> None:
        self.stops = 0

    def launch(self) -> None:
        raise WorkerError("it does not start")

    def stop(self) -> None:
        self.stops += 1
        raise OSError("its socket cannot be removed")


def test_a_group_that_cannot_be_ended_keeps_none_of_the_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def get_actor(name: str, _namespace: str) -> object:
        asked.append(name)
        raise ValueError(name)

    monkeypatch.setattr(deployment.ray, "get_actor", get_actor)
    groups = [Stubborn(), Stubborn()]
    running = Deployment(plan([model("chat")], INSTANCES["inf2.48xlarge"]), FaultPolicy(), groups)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="cannot be removed"):
        running.close()
    assert [one.stops for one in groups] == [1, 1] and asked == ["paceline-core-allocator"]
    running.close()
    assert [one.stops for one in groups] == [1, 1]
    with pytest.raises(OSError, match="cannot be removed"):
        Deployment(running.plan, FaultPolicy(), groups).start()  # type: ignore[arg-type]
    assert [one.stops for one in groups] == [3, 3]


def test_the_longest_name_has_a_socket_in_a_temporary_folder_far_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's names of sockets end at 107 bytes."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 55)
    made = plan([model("chat"), model("d" * 63, draft_of=("chat",))], INSTANCES["inf2.48xlarge"])
    locations = {item.label: Location(item.label, "here", item.cores) for item in made.placements}
    specs = worker_specs(made.instance, made.placements, FaultPolicy(), locations=locations)
    address = specs["chat"].address
    assert address == specs["d" * 63].address and address is not None and len(address.path) < 108


class Homeless(deployment.WorkerGroup):
    """Whose node died; ``room``: whether another one has room for it."""

    room = True

    def _launch(self) -> None:
        if not self.room:
            raise PlanError("no node has room")
        self._workers = {item.label: Worker(None, object()) for item in self.placements}

    def _wait_ready(self) -> None:
        self._launched = True

    def _nodes_live(self) -> bool:
        return False

    def _clear(self) -> None:
        self._workers = {}


def test_a_move_that_failed_is_tried_again_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "_kill", [].append)
    made = plan([model("chat")], INSTANCES["inf2.48xlarge"])
    group = Homeless(made.instance, made.placements, FaultPolicy())
    group.launch()
    group.wait_ready()
    seen, group.room = group.actor("chat"), False
    for _ in range(2):
        with pytest.raises(PlanError, match="no node has room"):
            group.restart("chat", seen) if group._workers else group.actor("chat")
    group.room = True
    assert group.actor("chat") is not seen and group.moves == 3
    group.stop()
    with pytest.raises(WorkerError):
        group.actor("chat")
