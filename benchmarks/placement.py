"""Costs and gains of a drafter in another process, with models that sleep. JSON on the last line.

    python benchmarks/placement.py                    the first three (about a minute)
    python benchmarks/placement.py --part overhead    a round with the drafter elsewhere against one process
    python benchmarks/placement.py --part ahead       drafting while the target verifies, against taking turns
    python benchmarks/placement.py --part recovery    from the death of a drafter to its next proposal
    python benchmarks/placement.py --part target      from the death of a target's process to the next token, on Ray
    python benchmarks/placement.py --part colocation  up to 24 models on Ray, on the cores of a simulated inf2.48xlarge

The models sleep in place of computing, so that the CPU is idle as it is beside an accelerator, and know the text; the
drafter errs with a given probability. What is measured is therefore everything but the models.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import torch
from common import publish
from sleepers import K, SleepingDrafter, SleepingVerifier, V, truth
from undivided import MAKERS

from paceline import placement
from paceline.core.protocols import Drafter, finish
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits
from paceline.engine.rounds import RoundPlan, Rounds
from paceline.placement.host.core_locks import held
from paceline.placement.planning.model_specs import models_of
from paceline.placement.remote.channel import Address
from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts, RemoteDrafter
from paceline.placement.remote.process import LocalProcess, ProcessSpec
from paceline.placement.remote.reconnect import DrafterEndpoint

ROOT = Path(__file__).parents[1]
_BLOCK = 20
SECOND = 0.65  # how often the demo draft's second choice is right where its first is not: .72 greedy, .63 sampled
GREEDY = sampling_tensors([Sampling()])
LIMIT = RoundLimits([K], 1)


@contextmanager
def elsewhere(
    seconds: float, alpha: float, *, ahead: bool = False, beta: float | None = None
) -> Iterator[tuple[RemoteDrafter, LocalProcess]]:
    """The drafter in a separate process. ``beta``: how often its second choice is right where the first is not."""
    with tempfile.TemporaryDirectory() as folder:
        spec = ProcessSpec(
            Address(path=f"{folder}/s"),
            secrets.token_bytes(16),
            {"seconds": seconds, "alpha": alpha, "ahead": ahead, "beta": beta},
            maker="benchmarks.sleepers:sleeper",
        )
        with LocalProcess(spec) as process:
            contract = DrafterContract(num_draft_tokens=K, slots=1, vocab_size=V)
            timeouts = DraftTimeouts(reply_timeout_s=1.0, hang_timeout_s=1.0, backoff_s=0.01)
            draft = RemoteDrafter(contract, DrafterEndpoint(spec.address, spec.secret, process), timeouts=timeouts)
            try:
                if not draft.wait_until_up(60):
                    raise RuntimeError("the drafter's process did not come up")
                yield draft, process
            finally:
                draft.close()


class Text:
    """One request, round by round."""

    def __init__(self, drafter: Drafter, verify: float) -> None:
        self._round = Rounds(drafter, {K: RoundPlan(drafter, SleepingVerifier(verify), K + 1)})
        prompt = [truth(p) for p in range(8)]
        finish(self._round.start(0, prompt, GREEDY))
        tokens = torch.tensor([[truth(8)] + [PAD] * K], dtype=torch.int32)
        self.commit = Commit(tokens, torch.ones(1, dtype=torch.int32), torch.full((1,), 8, dtype=torch.int32))
        self.first = 9

    def step(self) -> None:
        self.commit = self._round(self.commit, GREEDY, LIMIT).commit

    @property
    def tokens(self) -> int:
        return int(self.commit.first_row[0] + self.commit.count[0]) - self.first


def alternating(steps: Mapping[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Milliseconds of each step, in blocks that take turns; the first of a block find cold caches and do not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(max(2, turns // _BLOCK)):
        for name, step in steps.items():
            for place in range(_BLOCK + 3):
                begin = perf_counter()
                step()
                if place >= 3:
                    times[name].append(1e3 * (perf_counter() - begin))
    return times


def overhead() -> dict[str, object]:
    """Times of rounds, half drafting and half verifying, with the drafter in this process and in another."""
    found: dict[str, object] = {}
    for total, turns in ((1, 400), (5, 250), (10, 200), (30, 80)):
        half = total / 2000
        with elsewhere(half, 0.8) as (draft, _):
            here, there = Text(SleepingDrafter(K, half, 0.8), half), Text(draft, half)
            times = alternating({"here": here.step, "there": there.step}, turns)
            assert here.tokens == there.tokens, "another process, another text"
        mean = {name: statistics.fmean(values) for name, values in times.items()}
        middle = {name: statistics.median(values) for name, values in times.items()}
        found[f"{total} ms"] = {
            "here_ms": round(middle["here"], 3),
            "there_ms": round(middle["there"], 3),
            "overhead_percent": round(100 * (middle["there"] / middle["here"] - 1), 2),
            "overhead_percent_of_means": round(100 * (mean["there"] / mean["here"] - 1), 2),
        }
    return found


def ahead() -> dict[str, object]:
    """Milliseconds a token: taking turns, ahead for the one outcome that all is right, and for several outcomes."""
    found: dict[str, object] = {}
    for draft_ms, verify_ms in ((5, 5), (10, 20), (5, 25)):
        for alpha in (1.0, 0.9, 0.7):
            found[f"{draft_ms}+{verify_ms} ms, alpha {alpha}"] = ahead_at(draft_ms, verify_ms, alpha)
    return found


def ahead_at(draft_ms: int, verify_ms: int, alpha: float) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, on, beta in (("turns", False, None), ("one", True, None), ("several", True, SECOND)):
        with elsewhere(draft_ms / 1000, alpha, ahead=on, beta=beta) as (draft, _):
            text = Text(draft, verify_ms / 1000)
            begin = perf_counter()
            for _ in range(120):
                text.step()
            row[f"{name}_ms_a_token"] = round(1e3 * (perf_counter() - begin) / text.tokens, 3)
            if on:
                row[f"{name}_hit_rate"] = round(draft.health.hit_rate, 3)
    return row


def recovery() -> dict[str, object]:
    """Seconds from a signal to the next proposal, in rounds of 10 ms; rounds continue all the while."""
    found: dict[str, object] = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        times, longest = [], []
        with elsewhere(0.005, 0.8) as (draft, process):
            text = Text(draft, 0.005)
            for _ in range(3):
                for _ in range(20):
                    text.step()
                answered, begin = draft.health.answered, perf_counter()
                os.kill(process.pid, number)
                slowest = 0.0
                while draft.health.answered <= answered + 1:
                    before = perf_counter()
                    text.step()
                    slowest = max(slowest, perf_counter() - before)
                times.append(perf_counter() - begin)
                longest.append(slowest)
        found[number.name] = {"seconds": [round(t, 2) for t in times], "longest_round": round(max(longest), 3)}
    return found


def target() -> dict[str, object]:
    """The longest wait for a token in a request whose target is killed, and in one without a fault; seconds."""
    import ray

    pair = [
        {"name": "t", "tp_degree": 1, "path": str(ROOT / "examples" / "pycode" / "target")},
        {"name": "d", "tp_degree": 1, "path": str(ROOT / "examples" / "pycode" / "draft"), "draft_of": "t"},
    ]
    models = models_of(
        [{**e, "n_positions": 1024, "amp": "f32", "backend": "eager"} for e in pair], folder=ROOT, where=""
    )
    waits: dict[str, list[float]] = {"calm": [], "killed": []}
    texts = set()
    try:
        with placement.launch(placement.plan(models, placement.instance("inf2.48xlarge"))) as running:
            node, cores = ray.get_runtime_context().get_node_id(), running.cores()["t"]
            warm = list(running.stream("t", [[5, 6, 7, 8]], max_new_tokens=50))
            assert warm, "the target gives tokens"
            for name in ("calm", "killed") * 2:
                begin, gaps, text = perf_counter(), [0.0], []
                for number, piece in enumerate(running.stream("t", [[5, 6, 7, 8]], max_new_tokens=200)):
                    gaps.append(perf_counter() - begin)
                    text += piece.tokens
                    if number == 20 and name == "killed":
                        os.kill(held(node)[cores.first], signal.SIGKILL)
                    begin = perf_counter()
                waits[name].append(round(max(gaps), 2))
                texts.add(tuple(text))
    finally:
        ray.shutdown()
    return {**waits, "texts": len(texts)}


def mixes(small: Path) -> dict[str, tuple[list[dict[str, object]], dict[str, object]]]:
    """Models that run side by side, and who comes when the first of them has left. ``small``: a tiny checkpoint."""
    target, draft = ({"path": str(ROOT / "examples" / "pycode" / name)} for name in ("target", "draft"))
    tiny: dict[str, object] = {"path": str(small)}
    return {
        "three of 8": ([{"name": f"t{i}", "tp_degree": 8, **target} for i in range(3)], {"tp_degree": 4, **tiny}),
        "8 with a draft of 2, and others": (
            [
                {"name": "t", "tp_degree": 8, **target},
                {"name": "d", "tp_degree": 2, "draft_of": "t", **draft},
                *({"name": f"o{i}", "tp_degree": degree, **tiny} for i, degree in enumerate((4, 4, 1))),
            ],
            {"tp_degree": 8, **tiny},
        ),
        "24 of 1": ([{"name": f"s{i}", "tp_degree": 1, **tiny} for i in range(24)], {"tp_degree": 1, **tiny}),
    }


def left(running: placement.Deployment) -> dict[str, object]:
    (found,) = running.fragmentation().values()
    runs = {str(degree): count for degree, count in found.runs if count}
    return {"free": found.free, "runs": runs, "stranded": round(found.stranded, 2)}


def used_at_once(running: placement.Deployment) -> int:
    """Every target answers a request, all at the same time. -> different texts."""
    with ThreadPoolExecutor(len(running.models)) as pool:
        asked = {"max_new_tokens": 16}
        return len(
            {str(text) for text in pool.map(lambda m: running.sample(m, [[5, 6, 7, 8]], **asked), running.models)}
        )


def colocation() -> dict[str, object]:
    """Models side by side on a simulated inf2.48xlarge: seconds to start, all used at once, one leaves, one comes."""
    import ray
    from transformers import LlamaConfig, LlamaForCausalLM

    found: dict[str, object] = {}
    machine = placement.instance("inf2.48xlarge")
    common = {"n_positions": 128, "amp": "f32", "backend": "eager"}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(
            LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=8)
        ).save_pretrained(folder)
        try:
            for name, (entries, last) in mixes(Path(folder)).items():
                made, more = (
                    placement.plan(models_of([{**e, **common} for e in given], folder=ROOT, where=name), machine)
                    for given in (entries, [{"name": "new", **last}])
                )
                begin = perf_counter()
                with placement.launch(made, fault_policy=placement.FaultPolicy(makers=MAKERS)) as running:
                    row: dict[str, object] = {"workers": len(entries)}
                    row["start_seconds"], begin = round(perf_counter() - begin, 1), perf_counter()
                    row["texts"] = used_at_once(running)
                    row["use_seconds"] = round(perf_counter() - begin, 1)
                    row["full"] = left(running)
                    running.stop(str(entries[0]["name"]))
                    row["one_left"] = left(running)
                    running.add(more)
                    row["new_on"], row["with_new"] = str(running.cores()["new"]), left(running)
                    used_at_once(running)
                    begin = perf_counter()
                row["stop_seconds"] = round(perf_counter() - begin, 1)
                found[name] = row
                print(name, row, file=sys.stderr, flush=True)
        finally:
            ray.shutdown()
    return found


PARTS: dict[str, Callable[[], dict[str, object]]] = {
    "overhead": overhead,
    "ahead": ahead,
    "recovery": recovery,
    "target": target,
    "colocation": colocation,
}
USUAL = ("overhead", "ahead", "recovery")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    os.chdir(ROOT)  # so that the drafter's process finds this file
    torch.set_num_threads(1)
    publish({name: PARTS[name]() for name in parser.parse_args().part or USUAL})


if __name__ == "__main__":
    main()
