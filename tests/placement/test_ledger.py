"""The ledger's books without Ray: whose claims are void, and what the caller hears of a silent ledger."""

from __future__ import annotations

import pytest

ray = pytest.importorskip("ray")

from paceline.core.errors import PlanError, WorkerError  # noqa: E402
from paceline.placement import INSTANCES, ledger  # noqa: E402
from paceline.placement.ledger import Claim, Ledger, asked  # noqa: E402
from paceline.placement.ranges import CoreRange  # noqa: E402

WHOLE = CoreRange(0, 23)


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, CoreRange]]:
    """Claim -> node and cores of the workers that live."""
    found: dict[str, tuple[str, CoreRange]] = {}
    monkeypatch.setattr(ledger, "_workers", lambda: dict(found))
    return found


def test_the_claim_of_a_caller_that_died_while_it_loaded_is_void(living: dict[str, tuple[str, CoreRange]]) -> None:
    book = Ledger(INSTANCES["inf2.48xlarge"])
    book.claim("node", [Claim("loads", 16, CoreRange(0, 15), start=60)])
    book.claim("node", [Claim("dies", 8, CoreRange(16, 23), start=-1)])
    assert book.claim("node", [Claim("next", 8, CoreRange(16, 23))]) == [CoreRange(16, 23)]
    assert book.taken() == {"node": {"loads": CoreRange(0, 15), "next": CoreRange(16, 23)}}
    book.release(["loads", "next"])
    book.claim("node", [Claim("slow", 24, WHOLE, start=-1)])
    living["slow"] = "node", WHOLE  # late, but there
    assert book.taken() == {"node": {"slow": WHOLE}}
    book.confirm(["slow"])
    with pytest.raises(PlanError):
        book.claim("node", [Claim("next", 8, CoreRange(0, 7))])
    living.clear()
    assert book.taken() == {}


def test_a_silent_ledger_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(reference: object, timeout: float) -> object:
        raise ray.exceptions.GetTimeoutError("nothing yet")

    monkeypatch.setattr(ray, "get", silent)
    with pytest.raises(WorkerError, match=r"no answer in 0\.5 seconds"):
        asked(object(), 0.5)
