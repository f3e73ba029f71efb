"""The ledger's books, mostly without Ray: whose claims are void, what is heard of a silent ledger, and when it ends."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

from paceline.core.errors import PlanError, WorkerError  # noqa: E402
from paceline.placement import INSTANCES  # noqa: E402
from paceline.placement.cluster import core_allocator, nodes  # noqa: E402
from paceline.placement.cluster.core_allocator import CoreAllocator, CoreRequest, ask, end_unused, give_back  # noqa: E402
from paceline.placement.planning.core_range import CoreRange  # noqa: E402
from tests.simulation import check_nothing_left  # noqa: E402

WHOLE = CoreRange(0, 23)


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, CoreRange]]:
    """Claim -> node and cores of the workers that live."""
    found: dict[str, tuple[str, CoreRange]] = {}
    monkeypatch.setattr(core_allocator, "_workers", lambda: dict(found))
    monkeypatch.setattr(nodes, "living", lambda: {"node"})
    return found


def test_the_claim_of_a_caller_that_died_while_it_loaded_is_void(living: dict[str, tuple[str, CoreRange]]) -> None:
    book = CoreAllocator(INSTANCES["inf2.48xlarge"])
    book.claim("node", [CoreRequest("loads", 16, CoreRange(0, 15), start=60)])
    book.claim("node", [CoreRequest("dies", 8, CoreRange(16, 23), start=-1)])
    assert book.claim("node", [CoreRequest("next", 8, CoreRange(16, 23))]) == [CoreRange(16, 23)]
    assert book.taken() == {"node": {"loads": CoreRange(0, 15), "next": CoreRange(16, 23)}}
    book.release(["loads", "next"])
    book.claim("node", [CoreRequest("slow", 24, WHOLE, start=-1)])
    living["slow"] = "node", WHOLE  # late, but there
    assert book.taken() == {"node": {"slow": WHOLE}}
    book.confirm(["slow"])
    with pytest.raises(PlanError):
        book.claim("node", [CoreRequest("next", 8, CoreRange(0, 7))])
    living.clear()
    assert book.taken() == {}


def test_a_node_that_is_gone_is_in_no_report(
    living: dict[str, tuple[str, CoreRange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers too, though Ray may still have their names: it would start them anew, and has nowhere to."""
    alive = {"node", "other"}
    monkeypatch.setattr(nodes, "living", lambda: alive)
    book = CoreAllocator(INSTANCES["inf2.48xlarge"])
    for node in sorted(alive):
        book.claim(node, [CoreRequest(f"at {node}", 8, CoreRange(0, 7))])
        living[f"at {node}"] = node, CoreRange(0, 7)
    book.confirm(sorted(living))
    assert set(book.report()) == set(book.taken()) == alive
    alive.remove("other")
    assert set(book.report()) == set(book.taken()) == {"node"}


class Asked:
    """Stands for an actor's handle; what a method answers is what `ray.get` makes of it."""

    def __getattr__(self, method: str) -> object:
        return SimpleNamespace(remote=lambda *_: method)


def test_a_silent_ledger_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(reference: object, timeout: float) -> object:
        raise ray.exceptions.GetTimeoutError("nothing yet")

    monkeypatch.setattr(ray, "get", silent)
    monkeypatch.setattr(core_allocator, "ledger", lambda _: Asked())
    with pytest.raises(WorkerError, match=r"no answer in 0\.5 seconds"):
        ask(INSTANCES["inf2.48xlarge"], "report", seconds=0.5)


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_ledger_that_has_just_ended_is_made_anew_once(monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    """Whoever leaves last ends it, perhaps while somebody else claims."""
    made = []

    def answer(reference: object, timeout: float) -> object:
        if len(made) <= deaths:
            raise ray.exceptions.ActorDiedError
        return reference

    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(core_allocator, "ledger", lambda _: made.append(Asked()) or made[-1])
    if deaths == 1:
        assert ask(INSTANCES["inf2.48xlarge"], "report", seconds=1) == "report"
    else:
        with pytest.raises(WorkerError):
            ask(INSTANCES["inf2.48xlarge"], "report", seconds=1)
    assert len(made) == 2


def test_what_is_in_use_does_not_end(living: dict[str, tuple[str, CoreRange]], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="me"))
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(core_allocator, "sleep", lambda _: None)
    book = CoreAllocator(INSTANCES["inf2.48xlarge"])
    book.claim("node", [CoreRequest("loads", 16, CoreRange(0, 15), start=60)])
    book.end_unused()
    assert not ended
    book.release(["loads"])
    book.end_unused()
    assert ended == ["me"]


def test_nothing_is_given_back_to_a_ledger_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise ValueError

    monkeypatch.setattr(ray, "get_actor", missing)
    monkeypatch.setattr(core_allocator, "ledger", lambda _: pytest.fail("made only to hear that nobody is there"))
    give_back(["gone"], 1)
    end_unused(1)


@pytest.mark.ray
def test_a_ledger_whose_users_were_killed_ends(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is left to end it. What is claimed is kept for as long as its worker may still come."""
    monkeypatch.setattr(core_allocator, "_IDLE", 0.1)
    book, node = core_allocator.ledger(INSTANCES["inf2.48xlarge"]), ray.nodes()[0]["NodeID"]
    ray.get(book.claim.remote(node, [CoreRequest("dies", 8, CoreRange(0, 7), start=5)]))
    time.sleep(1)
    assert ray.get(book.taken.remote()) == {node: {"dies": CoreRange(0, 7)}}
    check_nothing_left()
