"""How a connection to a drafter comes about: a refusal, a replaced process, and a supervisor that fails."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.core.protocols import Drafter
from paceline.placement.host.processes import Process
from paceline.placement.remote import channel
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts, RemoteDrafter
from paceline.placement.remote.messages import Handshake
from paceline.placement.remote.reconnect import DrafterEndpoint
from tests.placement.faulty import SECRET, V, drafter, serving
from tests.waiting import until

TIMEOUTS = DraftTimeouts(hang_timeout_s=1, backoff_s=0.002, max_backoff_s=0.05)


@dataclass
class Asked:
    """A supervisor that starts nothing, and may fail."""

    fails: bool = False
    acts: list[str] = field(default_factory=list)

    def replace(self, process: Process | None) -> bool:
        return self._act("replace")

    def ensure(self) -> bool:
        return self._act("ensure")

    def _act(self, name: str) -> bool:
        self.acts.append(name)
        if self.fails:
            raise RuntimeError("the supervisor fails")
        return False


class Tables:
    """A pool of ``count`` drafters."""

    def __init__(self, free: int) -> None:
        self._free = free

    def acquire(self, hello: Handshake) -> Drafter:
        if not self._free:
            raise ValueError("no drafter is free")
        self._free -= 1
        return drafter(hello.slots, 4)

    def release(self, _: Drafter) -> None:
        self._free += 1


def tables(address: Address, max_targets: int = 2) -> AbstractContextManager[None]:
    """Table models that draft four tokens, for up to ``targets`` targets."""
    return serving(listen(address), Tables(max_targets))


def called(
    stack: ExitStack, address: Address, supervisor: Asked, *, k: int = 4, startup_timeout_s: float = 0.3
) -> RemoteDrafter:
    contract = DrafterContract(num_draft_tokens=k, slots=1, vocab_size=V)
    endpoint = DrafterEndpoint(address, SECRET, supervisor, startup_timeout_s=startup_timeout_s)
    return stack.enter_context(closing(RemoteDrafter(contract, endpoint, timeouts=TIMEOUTS)))


def test_a_rejected_target_reports_why_and_keeps_the_process(tmp_path: Path, stack: ExitStack) -> None:
    """The process serves another target. A rejected one is admitted when a place is free."""
    address, supervisor = Address(path=str(tmp_path / "s")), Asked()
    stack.enter_context(tables(address, max_targets=1))
    first = called(stack, address, Asked())
    assert first.wait_until_up(20)
    second, misfit = called(stack, address, supervisor), called(stack, address, supervisor, k=3)
    time.sleep(0.8)  # longer than the patience with a process that does not answer
    assert supervisor.acts == [] and first.health.state == "up"
    for draft in (second, misfit):
        assert draft.health.state == "down" and "no drafter is free" in draft.health.last_error
    first.close()
    until(lambda: second.health.state == "up" or "not 3" in misfit.health.last_error)
    assert supervisor.acts == []


def test_a_process_that_cannot_be_called_is_replaced_after_the_patience(tmp_path: Path, stack: ExitStack) -> None:
    supervisor = Asked()
    draft = called(stack, Address(path=str(tmp_path / "s")), supervisor)
    until(lambda: "replace" in supervisor.acts)
    assert draft.health.state == "down" and "no drafter answers" in draft.health.last_error


def test_a_process_that_stops_before_it_is_called_is_replaced_before_the_patience_ends(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listening process has loaded its model; one that does not listen yet has the full time of a start."""
    monkeypatch.setattr(channel, "_AUTHENTICATION_S", 0.3)
    silent, loading = Asked(), Asked()
    stack.enter_context(closing(listen(Address(path=str(tmp_path / "s")))))
    late = called(stack, Address(path=str(tmp_path / "t")), loading, startup_timeout_s=600)
    draft = called(stack, Address(path=str(tmp_path / "s")), silent, startup_timeout_s=600)
    until(lambda: "replace" in silent.acts)
    assert "did not authenticate in time" in draft.health.last_error
    assert "no drafter answers" in late.health.last_error and "replace" not in loading.acts


def test_a_failing_supervisor_does_not_end_reconnecting(tmp_path: Path, stack: ExitStack) -> None:
    address, supervisor = Address(path=str(tmp_path / "s")), Asked(fails=True)
    draft = called(stack, address, supervisor)
    until(lambda: {"replace", "ensure"} <= set(supervisor.acts))
    stack.enter_context(tables(address))
    assert draft.wait_until_up(20) and draft.health.state == "up"
