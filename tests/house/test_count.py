"""scripts/count.py, which `make check` runs: a count above its bound is an error."""

import pytest

from scripts.count import BOUNDS, check


def test_a_count_above_its_bound_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """At a bound nothing is said; below one that it can be lowered."""
    assert check(dict(BOUNDS)) == 0 and not capsys.readouterr().out
    for name, most in BOUNDS.items():
        assert check({**BOUNDS, name: most + 1}) == 1
        assert f"{name}: {most + 1}, at most {most}" in capsys.readouterr().out
        assert check({**BOUNDS, name: most - 1}) == 0
        assert "lower its bound" in capsys.readouterr().out
