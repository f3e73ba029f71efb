"""The nodes of the cluster: which are alive, how one is reached, and how a process there is killed."""

from __future__ import annotations

import socket
from contextlib import suppress

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.placement.host import environment, processes
from paceline.placement.host.processes import Process
from paceline.placement.remote.channel import Address

NAMESPACE = "paceline"
"""Ray's namespace of all actors of this package."""
_TASK_S = 30.0  # for a small task


def living() -> set[str]:
    """The nodes that Ray counts as alive. A node that is gone never comes back under its id."""
    return {str(item["NodeID"]) for item in ray.nodes() if item["Alive"]}


def lives(node: str) -> bool:
    """Whether Ray counts the node as alive."""
    return node in living()


def tcp_address(node: str) -> Address:
    """The node's address in the cluster's network, with a port that is free there now."""
    host = next(str(item["NodeManagerAddress"]) for item in ray.nodes() if item["NodeID"] == node)
    return Address(host=host, port=int(ray.get(_on(node, _free_port).remote(host), timeout=_TASK_S)))


def kill(node: str, process: Process) -> bool:
    """End a process on a node, if it still runs; whether that is known."""
    with suppress(ray.exceptions.RayError):
        return bool(ray.get(_on(node, processes.kill).remote(process), timeout=_TASK_S))
    return False


def _on(node: str, function: object) -> ray.remote_function.RemoteFunction:
    """A task that runs on that node, without the cores of a worker that submits it."""
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    variables = {"env_vars": environment.without_cores()}
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=affinity, max_retries=0, runtime_env=variables)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
