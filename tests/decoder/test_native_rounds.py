"""Rounds of a recorded step in a row, without Python in between, are those that Python runs one by one."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.core.errors import BackendError
from paceline.core.types import RoundLimits, RoundReport
from paceline.decoder.native.program import Program, _Rounds
from paceline.engine import rounds
from tests.decoder.tiny import Workshop, fresh
from tests.equality.settings import PROMPTS, run
from tests.target.many_rounds import run_rounds


@pytest.mark.parametrize("ends", [[], [5, 17, 40]])
@pytest.mark.parametrize("setting", [{}, {"do_sample": True, "seed": 3}])
def test_native_multi_rounds_equal_the_python_rounds(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, setting: dict[str, object], ends: list[int]
) -> None:
    """More texts than slots, of unequal lengths, so that slots idle, limits shrink, and rows of rounds end early."""
    native, rows = Program.run_rounds, list[int]()

    def both(
        step: Program, inputs: list[Tensor], seconds: float, limits: RoundLimits
    ) -> tuple[list[RoundReport], list[Tensor]]:
        told, made = native(step, inputs, seconds, limits)
        # Once more over the same cache: what it overwrites is what it read.
        expected, last = run_rounds(step, inputs, seconds, limits)
        assert [(one.tokens, one.drafted) for one in told] == [(one.tokens, one.drafted) for one in expected]
        assert all(one.seconds > 0 for one in told)
        assert len(made) == len(last) == 3
        assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(made, last, strict=True))
        rows.append(len(told))
        return told, made

    monkeypatch.setattr(Program, "run_rounds", both)
    monkeypatch.setattr(rounds, "MULTI_ROUND_BUDGET_S", 60.0)
    generator = SpeculativeGenerator(*workshop.pair(backend="native"), k=4)
    prompts = [*PROMPTS, PROMPTS[0][:3]]
    done = generator.sample(prompts, max_new_tokens=40, eos_token_id=ends, return_dict=True, **setting)  # type: ignore[arg-type]
    assert max(rows) > 2 and min(rows) < max(rows)
    eager = SpeculativeGenerator(*workshop.pair(), k=4)
    wanted = eager.sample(prompts, max_new_tokens=40, eos_token_id=ends, return_dict=True, **setting)  # type: ignore[arg-type]
    assert done.sequences.tolist() == wanted.sequences.tolist()  # type: ignore[union-attr]


def test_the_time_budget_of_multi_rounds_is_kept(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second round for who has no time; and the tokens do not depend on it."""
    generator, found = SpeculativeGenerator(*workshop.pair(backend="native"), k=4), []
    calls: list[int] = []
    original = _Rounds.__call__

    def counted(*given: object) -> tuple[list[RoundReport], list[Tensor]]:
        told, made = original(*given)  # type: ignore[arg-type]
        calls.append(len(told))
        return told, made

    monkeypatch.setattr(_Rounds, "__call__", counted)
    for seconds in (0.0, 60.0):
        monkeypatch.setattr(rounds, "MULTI_ROUND_BUDGET_S", seconds)
        calls.clear()
        found.append(run(generator, {}).sequences.tolist())
        assert (max(calls) == 1) == (seconds == 0.0)
    assert found[0] == found[1]


def test_results_are_writable_after_a_first_call_in_inference_mode(workshop: Workshop) -> None:
    draft, target = (fresh(workshop.checkpoint(role), backend="native", batch_size=4) for role in ("draft", "target"))
    generator = SpeculativeGenerator(draft, target, k=4)
    with torch.inference_mode():
        first = run(generator, {}).sequences.tolist()
    assert run(generator, {}).sequences.tolist() == first


def test_a_failing_round_raises(workshop: Workshop) -> None:
    """The step is closed, as at the end of a process in which another thread continues."""
    draft, target = (fresh(workshop.checkpoint(role), backend="native", batch_size=4) for role in ("draft", "target"))
    generator = SpeculativeGenerator(draft, target, k=4)
    run(generator, {})
    for step in target._steps.values():
        assert isinstance(step, Program)
        if step._rounds is not None:
            step.close()
    with pytest.raises(BackendError, match="a round failed: the step is closed"):
        run(generator, {})


def test_other_threads_run_during_a_prefill(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also during other graphs: with a switch interval of 1000 s, only where the lock is released."""
    target = fresh(workshop.checkpoint("target"), backend="native", batch_size=4)
    run(SpeculativeGenerator("ngram", target, k=4), {})
    assert {key.kind for key, _ in target._steps} >= {"prefill", "verify"}
    turns, over = [0], threading.Event()

    def other() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0.0005)  # in which the lock is free

    thread, interval = threading.Thread(target=other), sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    thread.start()
    try:
        for (key, _), step in target._steps.items():
            assert isinstance(step, Program)
            for _ in range(3000):  # a call may be over before the operating system has woken the other thread
                before = turns[0]
                outputs = step(*step._example)
                after = turns[0]
                del outputs  # now: PyTorch gives the lock back where it frees a tensor, too
                if after > before:
                    break
            else:
                pytest.fail(f"no other thread of Python runs during {key}")
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
