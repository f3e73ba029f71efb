"""What is heard of a group that could not be brought back; workers themselves are `test_ray`'s."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from paceline.core.errors import WorkerError
from paceline.placement import INSTANCES, Care, group, plan
from paceline.placement.deployment import Deployment
from tests.placement.wishes import model


class Broken(group.Group):
    """Its node lives, and its target does not start again."""

    def _nodes_live(self) -> bool:
        return True

    def _respawn(self, label: str) -> None:
        raise WorkerError("its folder is gone")


def test_a_failed_restart_says_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_kill", [].append)
    made = plan([model("chat")], INSTANCES["inf2.48xlarge"])
    broken = Broken(made.instance, made.placements, Care(), given=object())
    broken._actors["chat"] = seen = object()
    with pytest.raises(WorkerError, match=r"could not be started again \(its folder is gone\)"):
        broken.revive("chat", seen)
    models = Deployment(made, Care(), [broken])
    assert models.cores() == {}  # nothing runs, and that is no error
    broken.stop()
    for asked in (lambda: broken.actor("chat"), lambda: broken.revive("chat", seen), broken.begin):
        with pytest.raises(WorkerError, match="stopped"):
            asked()
