"""Plans that tests of workers on real Ray launch, and references to compare with; no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from benchmarks.undivided import MAKERS
from paceline import AutoDecoder, SpeculativeGenerator
from paceline.outputs import GenerationResult
from paceline.placement import INSTANCES, Deployment, Plan, plan
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.host.core_locks import held
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.model_specs import models_of
from paceline.placement.remote.drafter import DraftTimeouts
from tests.decoder.tiny import Workshop
from tests.waiting import until

PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
SAMPLED = {"do_sample": True, "temperature": 1.3, "seed": 4}
TIMEOUTS = DraftTimeouts(reply_timeout_s=2, hang_timeout_s=1.5, backoff_s=0.01, max_backoff_s=0.1)
POLICY = FaultPolicy(
    startup_timeout_s=240, stall_timeout_s=20, placement_timeout_s=30, draft_timeouts=TIMEOUTS, makers=MAKERS
)


def entry(workshop: Workshop, name: str, role: str = "target", **more: object) -> dict[str, object]:
    shape = {"n_positions": 128, "amp": "f32", "backend": "eager", "tp_degree": 2}
    return {"name": name, "path": str(workshop.checkpoint(role)), **shape, **more}


def planned(*entries: dict[str, object]) -> Plan:
    return plan(models_of(entries, folder=Path(), where="test"), INSTANCES["inf2.48xlarge"])


def wanted(workshop: Workshop, prompts: list[list[int]], **asked: object) -> list[list[int]]:
    """Plain decoding of the target in this process."""
    decoder = AutoDecoder.from_pretrained(workshop.checkpoint(), n_positions=128, amp="f32", backend="eager")
    plain = SpeculativeGenerator(None, decoder, k=0, verify_width=5)
    result = plain.sample(prompts, return_dict=True, **asked)  # type: ignore[arg-type]
    assert isinstance(result, GenerationResult)
    return [row[:size].tolist() for row, size in zip(result.sequences, result.lengths, strict=True)]


def pid_on(cores: CoreRange, node: str | None = None) -> int | None:
    """The process that holds these cores (of the first node), which need not answer; None while there is none."""
    home = node or ray.get_runtime_context().get_node_id()
    return held(home).get(cores.first) or None  # 0: the owner has not written its pid yet


def drafts(models: Deployment, target: str) -> bool:
    """Whether the target's drafter is up, and answered in a call that was just made."""
    models.sample(target, PROMPTS[:1], max_new_tokens=4)
    health: Any = until(lambda: models.statistics(target)["drafter_health"], 30)  # an answer ends before its rounds do
    return health["state"] == "up" and health["answered"] > 0  # type: ignore[no-any-return]


def wait_for_draft(models: Deployment, target: str) -> None:
    """Wait until the target's drafter answers."""
    until(lambda: drafts(models, target), what=lambda: models.statistics(target), pause_s=0.05)


def ranks_of(pid: int) -> list[int]:
    """Processes of the other ranks that a worker started."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if b"paceline.decoder.parallel.rank_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found
