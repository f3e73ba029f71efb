"""A simulated cluster of two inf2.48xlarge on real Ray, one for all tests that need it; no tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

STORE = 100 << 20
CORES = 24


@contextmanager
def simulated(locks: str) -> Iterator[object]:
    """A `ray.cluster_utils.Cluster` of one node, which notices dead nodes soon; this process is connected to it."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from paceline.placement.cluster.nodes import NAMESPACE

    system = {"health_check_period_ms": 300, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    node = {"num_cpus": 1, "resources": {"neuron_cores": CORES}, "object_store_memory": STORE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_LOCKS", locks)
        made = Cluster(
            initialize_head=True, head_node_args={**node, "_system_config": system, "include_dashboard": False}
        )
        try:
            ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def left_over() -> tuple[list[str], list[dict[int, int]]]:
    """Actors and cores of ours that are still in use."""
    import ray

    from paceline.placement.cluster.core_allocator import NAME, WORKERS
    from paceline.placement.host.core_locks import held

    names = [item["name"] for item in ray.util.list_named_actors(all_namespaces=True)]
    cores = [found for node in ray.nodes() if (found := held(node["NodeID"]))]
    return [name for name in names if name.startswith((WORKERS, "paceline-lifecycle-")) or name == NAME], cores


def check_nothing_left(seconds: float = 60) -> None:
    """No actor and no core is in use, or will be soon."""
    end = time.monotonic() + seconds
    while any(found := left_over()):
        assert time.monotonic() < end, found
        time.sleep(0.1)
