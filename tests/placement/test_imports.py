"""Imports load no more than needed: the package neither placement nor Ray, planning neither Ray nor sockets."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLANNING = (
    "import paceline.placement.planning.model_specs, paceline.placement.planning.planner, "
    "paceline.placement.planning.plan, paceline.placement.planning.planner, "
    "paceline.placement.planning.instances; from paceline.placement import Plan, plan, read_models"
)


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import paceline", ["ray", "msgspec", "paceline.placement"]),
        ("import paceline.placement", ["ray", "msgspec", "paceline.placement.planning"]),
        (PLANNING, ["ray", "msgspec", "paceline.placement.remote", "paceline.placement.cluster"]),
    ],
    ids=["the package", "placement", "planning"],
)
def test_importing_loads_no_more_than_it_needs(program: str, unwanted: list[str]) -> None:
    check = f"{program}; import sys; print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
