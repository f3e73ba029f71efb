"""The order of the files: every listed file exists, once, and all that use Ray are one piece of work."""

from __future__ import annotations

import pytest

from tests import order
from tests.house.test_structure import REPOSITORY


def test_ordered_files_exist_and_are_listed_once() -> None:
    named = [*order.RAY, *order.LONG]
    assert len(set(named)) == len(named)
    assert [file for file in named if not (REPOSITORY / file).is_file()] == []


def test_files_that_use_ray_have_its_mark() -> None:
    files = (REPOSITORY / "tests").rglob("test_*.py")
    marked = {path.relative_to(REPOSITORY).as_posix() for path in files if "pytest.mark" + ".ray" in path.read_text()}
    assert marked == set(order.RAY)
    assert {order.scope_of(f"{file}::test_x[a::b]") for file in order.RAY} == {"ray"}
    assert order.scope_of("tests/core/test_types.py::test_x") == "tests/core/test_types.py"


def test_a_slow_file_is_reported() -> None:
    def report(file: str, duration: float) -> pytest.TestReport:
        return pytest.TestReport(f"{file}::test_x", ("", 0, ""), {}, "passed", None, "call", duration=duration)

    reports = [report(order.LONG[0], 99.0), report("tests/new.py", 15.0), report("tests/new.py", 9.0)]
    assert order.unnamed([*reports, report("tests/short.py", 1.0)]) == {"tests/new.py": 24.0}
