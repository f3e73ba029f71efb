"""The processes of a service that runs below a process of this machine, by what Ray calls them."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

KINDS = {
    "ray::ServeReplica:paceline:openai": "ingress",
    "ray::DraftWorker": "draft",
    "ray::CoreAllocator": "allocator",
    "ray::LifecycleActor": "lifecycle",
    "ray::ServeController": "controller",
    "ray::ProxyActor": "proxy",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MODEL = "ray::ServeReplica:paceline:model-"


def processes(root: int) -> dict[str, int]:
    """Kind -> pid, of the processes below ``root``: those of KINDS, and "model:NAME" for the replica of a model."""
    return dict(every_process(root))


def count_processes(root: int) -> Counter[str]:
    """Kind -> number of processes. A process that has ended and was not waited for yet has no name, hence no kind."""
    return Counter(kind for kind, _ in every_process(root))


def every_process(root: int) -> Iterator[tuple[str, int]]:
    for pid in descendants(root):
        with suppress(OSError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if title.startswith(_MODEL):
                yield f"model:{title.removeprefix(_MODEL).split(' ')[0].partition('.')[0]}", pid
            yield from ((kind, pid) for start, kind in KINDS.items() if title.startswith(start))


def is_stopped(pid: int) -> bool:
    """Whether there is such a process, and a signal has stopped it."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    return False


def memory(root: int) -> dict[str, float]:
    """Kind -> MiB that a process holds in memory."""
    found = {}
    for kind, pid in processes(root).items():
        with suppress(OSError, IndexError, ValueError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[kind] = pages * _PAGE / (1 << 20)
    return found


def descendants(root: int) -> Iterator[int]:
    """Every process below a process, in no order."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children[parent].append(int(entry.name))
    waiting = [root]
    while waiting:
        below = children[waiting.pop()]
        yield from below
        waiting += below


@contextmanager
def cluster() -> Iterator[None]:
    """Ray with one node, this machine's cores and no log of its workers, in this process."""
    import ray

    from paceline.placement.host import environment
    from paceline.placement.planning.instances import host_cpus

    environment.prepare_new_cluster()
    cores = {"neuron_cores": host_cpus().cores}
    ray.init(address="local", log_to_driver=False, num_cpus=2, resources=cores, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()
