"""Watch Ray Serve add a replica of a model under load and take it away again, and compare every text meanwhile.

    python -m benchmarks.autoscale --target DIR [--streams 4]

One model with ``autoscaling: {min_replicas: 1, max_replicas: 2}`` on the CPU. Streams at temperature 0.8 run until the
second replica answers; then one stream at a time runs until it is gone. Prints JSON on its last line:
up_s     from the first stream until two replicas run
down_s   from the end of the load until one runs, and the other has ended
streams  of both phases together
equal    those with the text of the same request before
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from ray import serve

from benchmarks.fault_clients import GIVE_UP_S, Client
from benchmarks.faults import service
from paceline.placement.planning.groups import ReplicaGroupPlan, plan_groups
from paceline.placement.planning.instances import host_cpus
from paceline.placement.planning.model_specs import models_of

_SEEDS = 8
_SCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 1, "downscale_delay_s": 2,
}  # fmt: skip


def groups_of(target: Path, *, backend: str) -> tuple[ReplicaGroupPlan, ...]:
    """A model that Ray Serve scales."""
    entry = {
        "name": "big", "path": str(target.resolve()), "amp": "f32", "backend": backend, "batch_size": 2,
        "n_positions": 128, "autoscaling": _SCALING,
    }  # fmt: skip
    return plan_groups(models_of([entry], folder=Path(), where="benchmark"), host_cpus())


def replicas() -> dict[str, int]:
    """How many are in which state."""
    deployment = serve.status().applications["paceline"].deployments["model-big"]
    return {str(getattr(state, "value", state)): number for state, number in deployment.replica_states.items()}


def until(wanted: dict[str, int], client: Client, texts: dict[int, str], *, streams: int) -> tuple[float, int, int]:
    """Run streams, so many at a time, until the replicas are in these states. -> seconds, streams, equal ones"""
    begin, seeds, done, equal = time.monotonic(), count(), 0, 0
    reached: float | None = None

    def one(seed: int) -> bool:
        stream = client.stream(seed)
        return not stream.error and stream.text == texts[seed]

    with ThreadPoolExecutor(streams) as pool:
        while reached is None and time.monotonic() - begin < GIVE_UP_S:
            for same in pool.map(one, [next(seeds) % _SEEDS for _ in range(streams)]):
                done, equal = done + 1, equal + same
            reached = time.monotonic() - begin if replicas() == wanted else None
    return (float("inf") if reached is None else round(reached, 1)), done, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100)
    options = parser.parse_args()
    with service(groups_of(options.target, backend=options.backend)) as url:
        client = Client(url, tokens=options.tokens)
        client.wait_until_whole()
        texts = {seed: client.stream(seed).text for seed in range(_SEEDS)}
        up_s, risen, equal_risen = until({"RUNNING": 2}, client, texts, streams=options.streams)
        print(f"two replicas after {up_s} s; {equal_risen} of {risen} streams with the same text", flush=True)
        down_s, fallen, equal_fallen = until({"RUNNING": 1}, client, texts, streams=1)
    streams, equal = risen + fallen, equal_risen + equal_fallen
    print(json.dumps({"up_s": up_s, "down_s": down_s, "streams": streams, "equal": equal}))


if __name__ == "__main__":
    main()
