"""A simulated cluster of many machines for the planner and the core allocator: place, lose, replace. No model loads.

    python benchmarks/scale.py [--nodes 100] [--instance inf2.48xlarge]

The allocator is the one that runs in a cluster, over a record of who lives in place of Ray. Scheduling is Ray's part;
here a group goes to the machine that is used most and has room. Prints JSON on its last line.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from paceline.core.errors import PlanError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions
from paceline.placement.cluster.core_allocator import ClusterView, CoreAllocator, CoreRequest
from paceline.placement.planning.core_range import CoreRange, best_fit, fragmentation
from paceline.placement.planning.groups import ReplicaGroupPlan, plan_groups
from paceline.placement.planning.instances import Instance, instance
from paceline.placement.planning.model_specs import ModelSpec

_LOST_SHARE, _SHRINK_SHARE = 10, 3  # one node in so many is lost; one replica in so many ends
_LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_1B = {**_LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
             "tie_word_embeddings": True}  # fmt: skip


class Cluster(ClusterView):
    """A cluster without Ray: who lives."""

    def __init__(self, nodes: int) -> None:
        self.alive = {f"node-{number:03}" for number in range(nodes)}
        self.workers: dict[str, None] = {}
        self.record: Mapping[str, Any] = {}

    def nodes(self) -> set[str]:
        return self.alive

    def actors(self) -> dict[str, tuple[str, CoreRange] | None]:
        return dict(self.workers)

    def read(self) -> Mapping[str, Any]:
        return self.record

    def store(self, record: Mapping[str, object]) -> None:
        self.record = json.loads(json.dumps(record))  # as a real one, which has to write it


class Scheduler:
    """Starts and ends replica groups on a simulated cluster."""

    def __init__(self, machine: Instance, cluster: Cluster) -> None:
        self.machine, self.cluster, self.allocator = machine, cluster, CoreAllocator(cluster=cluster)
        self.placed: dict[str, tuple[str, ReplicaGroupPlan]] = {}  # replica -> node, group
        self._used: dict[str, list[CoreRange]] = {}
        self.claim_seconds: list[float] = []
        self._count = 0

    def start(self, group: ReplicaGroupPlan) -> bool:
        # The most used first, so that whole machines stay free for what needs them.
        for node in sorted(self.cluster.alive, key=lambda name: (-sum(map(len, self._used.get(name, []))), name)):
            if not self._fits(node, group):
                continue
            self._count += 1
            names = [f"{group.name}-{self._count}-{place}" for place in range(len(group.plan.placements))]
            requests = [CoreRequest(name, item.cores) for name, item in zip(names, group.plan.placements, strict=True)]
            begin = perf_counter()
            try:
                ranges = self.allocator.claim(node, self.machine, requests)
            except PlanError:
                continue
            finally:
                self.claim_seconds.append(perf_counter() - begin)
            self._used.setdefault(node, []).extend(ranges)
            self.cluster.workers |= dict.fromkeys(names)
            self.allocator.confirm(names)
            self.placed[f"{group.name}-{self._count}"] = node, group
            return True
        return False

    def end(self, replica: str) -> None:
        self.placed.pop(replica)
        names = [name for name in self.cluster.workers if name.startswith(f"{replica}-")]
        for name in names:
            del self.cluster.workers[name]
        self.allocator.release(names)
        self._look()

    def lose(self, nodes: Sequence[str]) -> list[ReplicaGroupPlan]:
        """These machines are gone; the groups that were on them."""
        self.cluster.alive -= set(nodes)
        lost = [replica for replica, (node, _) in self.placed.items() if node in nodes]
        groups = [self.placed.pop(replica)[1] for replica in lost]
        for replica in lost:
            for name in [name for name in self.cluster.workers if name.startswith(f"{replica}-")]:
                del self.cluster.workers[name]
        self._look()
        return groups

    def figures(self) -> dict[str, object]:
        """How full the cluster is, and in what pieces the rest is."""
        left = [fragmentation(self.machine, self._used.get(node, [])) for node in self.cluster.alive]
        free = sum(one.free for one in left)
        return {
            "replicas": len(self.placed),
            "nodes": len(left),
            "free_cores": free,
            "used_share": round(1 - free / (len(left) * self.machine.cores), 4),
            "free_runs_of_8": sum(dict(one.runs).get(8, 0) for one in left),
            "stranded_for_8": free - 8 * sum(dict(one.runs).get(8, 0) for one in left),
        }

    def _fits(self, node: str, group: ReplicaGroupPlan) -> bool:
        used = list(self._used.get(node, []))
        for degree in group.num_cores:
            run = best_fit(self.machine, used, degree)
            if run is None:
                return False
            used.append(run)
        return True

    def _look(self) -> None:
        self._used = {node: list(ranges.values()) for node, ranges in self.allocator.taken().items()}


def models() -> tuple[ModelSpec, ...]:
    """An 8B model on 8 cores with a 1B draft on 2, one that takes 8 and drafts by n-grams, and a 1B model on 2."""
    large, small = ModelConfig.from_fields(Fields(_LLAMA_8B, "8B")), ModelConfig.from_fields(Fields(_LLAMA_1B, "1B"))
    shape = LoadOptions(batch_size=8, n_positions=4096)
    pair = ModelSpec("pair", large, None, shape, degree=8)
    draft = ModelSpec("pair-draft", small, None, shape, degree=2, draft_of=("pair",))
    return pair, draft, replace(pair, name="alone"), ModelSpec("small", small, None, shape, degree=2)


def run(machine: Instance, num_nodes: int) -> dict[str, object]:
    """Fill the cluster, shrink and grow, lose machines and replace them, lose the allocator."""
    draw, report = random.Random(0), dict[str, object]()
    begin = perf_counter()
    groups = plan_groups(models(), machine)
    report["plan_s"] = round(perf_counter() - begin, 4)
    scheduler = Scheduler(machine, Cluster(num_nodes))

    def fill() -> int:
        started, open_groups = 0, list(groups)
        while open_groups:
            group = draw.choice(open_groups)
            if scheduler.start(group):
                started += 1
            else:
                open_groups.remove(group)
        return started

    def timed(name: str, started: int, begin: float) -> None:
        seconds = round(perf_counter() - begin, 2)
        report[name] = {"seconds": seconds, "started": started, **scheduler.figures()}

    begin = perf_counter()
    timed("place", fill(), begin)
    begin = perf_counter()
    for replica in draw.sample(sorted(scheduler.placed), len(scheduler.placed) // _SHRINK_SHARE):
        scheduler.end(replica)
    timed("shrink", 0, begin)
    begin = perf_counter()
    timed("grow", fill(), begin)
    lost = scheduler.lose(draw.sample(sorted(scheduler.cluster.alive), num_nodes // _LOST_SHARE))
    begin = perf_counter()
    timed("lose", sum(map(scheduler.start, lost)), begin)
    scheduler.cluster.alive |= {f"new-{number:03}" for number in range(num_nodes // _LOST_SHARE)}
    begin = perf_counter()
    timed("replace", sum(map(scheduler.start, lost)), begin)
    begin, before = perf_counter(), scheduler.allocator.taken()
    scheduler.allocator = CoreAllocator(cluster=scheduler.cluster)
    assert scheduler.allocator.taken() == before, "an allocator that is restarted knows what is taken"
    report["allocator_restart_s"] = round(perf_counter() - begin, 3)
    claims = sorted(scheduler.claim_seconds)
    report["claim_ms"] = {"median": _ms(claims[len(claims) // 2]), "p99": _ms(claims[int(0.99 * len(claims))])}
    report["claims"] = len(claims)
    return report


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--instance", default="inf2.48xlarge")
    options = parser.parse_args()
    report = run(instance(options.instance), options.nodes)
    for name, value in report.items():
        print(f"{name:20} {value}")
    print(json.dumps({"nodes": options.nodes, "instance": options.instance, **report}))


if __name__ == "__main__":
    main()
