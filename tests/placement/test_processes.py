"""Cores held by locks, a drafter in a separate process, and a checkpoint through the full path without Ray."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline import SpeculativeGenerator
from paceline.core.errors import ConfigurationError, CoresBusyError, WorkerError
from paceline.decoder.options import LoadOptions
from paceline.placement.cluster.roles import maker
from paceline.placement.host import environment
from paceline.placement.host.core_locks import CoreLocks, held
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.remote.channel import Address
from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts, RemoteDrafter
from paceline.placement.remote.process import LocalProcess, ProcessSpec
from paceline.placement.remote.reconnect import DrafterEndpoint
from tests.decoder.tiny import VOCABULARY, Workshop, fresh
from tests.waiting import until

PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOCKS", str(tmp_path / "locks"))


def test_a_core_has_one_owner_on_a_node() -> None:
    first, second = CoreLocks(CoreRange(2, 5)), CoreLocks(CoreRange(5, 6))
    first.acquire()
    assert held() == dict.fromkeys(range(2, 6), os.getpid())
    with pytest.raises(CoresBusyError, match=f"core 5 of 5-6 is in use by process {os.getpid()}"):
        second.acquire(timeout=0.1)
    CoreLocks(CoreRange(5, 6), node="another").acquire(timeout=0)
    first.release()
    second.acquire(timeout=0)
    assert sorted(held()) == [5, 6]
    second.release()


def test_cores_are_released_with_their_process() -> None:
    program = (
        "from paceline.placement.host.core_locks import CoreLocks; "
        "from paceline.placement.planning.core_range import CoreRange; import time;"
        "CoreLocks(CoreRange(0, 1)).acquire(); print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    assert held() == {0: child.pid, 1: child.pid}
    child.kill()
    CoreLocks(CoreRange(0, 1)).acquire(timeout=10)
    child.wait()
    child.stdout.close()


def test_a_secret_is_not_shown() -> None:
    secret = b"nobody is to read this"
    order = ProcessSpec(Address(path="s"), secret, {})
    assert "nobody" not in repr(order) + repr(DrafterEndpoint(order.address, secret))
    assert ProcessSpec.from_json(order.to_json()) == order


def test_an_environment_that_differs_from_the_plan_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    env = (("NEURON_RT_VISIBLE_CORES", "0-7"), ("OMP_NUM_THREADS", "8"))
    for name, value in env:
        monkeypatch.setenv(name, value)
    environment.check(env)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-23")
    with pytest.raises(WorkerError, match="NEURON_RT_VISIBLE_CORES is '0-23', not '0-7'"):
        environment.check(env)
    child = environment.for_child((("OMP_NUM_THREADS", "2"),))
    assert child["NEURON_RT_VISIBLE_CORES"] == "" and child["OMP_NUM_THREADS"] == "2"


def test_makers_are_found_by_name() -> None:
    assert maker("paceline.workers.draft:make_drafters").__name__ == "make_drafters"
    for path in ("paceline.workers.draft", "paceline.nowhere:draft", "paceline.workers.draft:nothing"):
        with pytest.raises(ConfigurationError, match="module:function"):
            maker(path)


def order(workshop: Workshop, folder: Path, *, ahead: bool, slots: int, degree: int = 1) -> ProcessSpec:
    shape = asdict(LoadOptions(amp="f32", batch_size=slots, n_positions=128))
    settings = {**shape, "folder": str(workshop.checkpoint("draft")), "backend": "eager", "k": 4, "draft_ahead": ahead}
    settings |= {"tp_degree": degree, "group_query_attention": "replicated-heads" if degree > 1 else None}
    env = (("PACELINE_CORES", "2-3"), ("OMP_NUM_THREADS", "1"))
    return ProcessSpec(
        Address(path=str(folder / "s")), secrets.token_bytes(16), settings, cores=CoreRange(2, 3), env=env
    )


@pytest.mark.parametrize(("ahead", "slots", "degree"), [(False, 2, 1), (True, 1, 2)])
def test_a_separate_process_decodes(workshop: Workshop, tmp_path: Path, ahead: bool, slots: int, degree: int) -> None:
    target = fresh(workshop.checkpoint(), batch_size=slots)
    asked = {"max_new_tokens": 60, "do_sample": True, "seed": 8}
    expected = SpeculativeGenerator(None, target, k=0, verify_width=5).sample(PROMPTS, **asked).tolist()  # type: ignore[arg-type]
    spec = order(workshop, tmp_path, ahead=ahead, slots=slots, degree=degree)
    with ExitStack() as stack:
        process = stack.enter_context(LocalProcess(spec))
        contract = DrafterContract(num_draft_tokens=4, slots=slots, vocab_size=VOCABULARY, max_positions=128)
        timeouts = DraftTimeouts(reply_timeout_s=60, resync_timeout_s=60, hang_timeout_s=120, backoff_s=0.01)
        draft = stack.enter_context(
            closing(RemoteDrafter(contract, DrafterEndpoint(spec.address, spec.secret, process), timeouts=timeouts))
        )
        assert draft.wait_until_up(60) and held() == dict.fromkeys((2, 3), process.pid)
        generator = SpeculativeGenerator(draft, target)
        here = SpeculativeGenerator(fresh(workshop.checkpoint("draft"), batch_size=slots), target)
        assert here.sample(PROMPTS, **asked).tolist() == expected
        assert generator.sample(PROMPTS, **asked).tolist() == expected
        health = generator.statistics.drafter_health
        assert health is not None and health.answered > 0 == health.faults
        assert generator.statistics.num_accepted_tokens == here.statistics.num_accepted_tokens
        pause = 0.15
        for _ in generator.stream(PROMPTS, **asked):  # type: ignore[arg-type]
            if not ahead or draft.health.ahead:
                break
            time.sleep(pause)  # longer than this draft takes: what would not be ready in time is not begun
            pause = min(1.3 * pause, 3.0)  # on a busy machine that takes longer
        assert (draft.health.ahead > 0) == ahead
        os.kill(process.pid, signal.SIGKILL)
        assert generator.sample(PROMPTS, **asked).tolist() == expected
        assert draft.wait_until_up(60) and draft.health.restarts == draft.health.lost == 1
        assert generator.sample(PROMPTS, **asked).tolist() == expected
        assert generator.statistics.drafter_health is not None and generator.statistics.drafter_health.answered > 0
    until(lambda: not held(), 60)


def test_a_process_ends_with_its_parent(workshop: Workshop, tmp_path: Path) -> None:
    spec = order(workshop, tmp_path, ahead=False, slots=1)
    program = (
        "import sys, time; from paceline.placement.remote.process import LocalProcess, ProcessSpec; "
        "p = LocalProcess(ProcessSpec.from_json(sys.argv[1].encode())); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, spec.to_json().decode()])
    until(lambda: len(held()) == 2 or parent.poll() is not None, 60)
    assert parent.poll() is None
    parent.kill()
    parent.wait()
    until(lambda: not held(), 60)
